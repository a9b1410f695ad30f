import pytest
from hypothesis import given
from hypothesis import strategies as st

from arms.registry import CREATORS
from arms.spec import ALL, IN_PROCESS, OPTIONS, ArmSpec, parse_arm, parse_arms
from lumotree.errors import ArmError

VALUES = {
    "tree": st.sampled_from(["root", "chain-5", "hydra27", "-1,0,0,1"]),
    "plan": st.sampled_from(["choice.json", "runs/map.json"]),
    "passes": st.integers(0, 16).map(str) | st.sampled_from(["3/5", "1/16"]),
    "attention": st.sampled_from(["grouped", "stock"]),
    "selection": st.sampled_from(["fused", "separate"]),
    "operands": st.sampled_from(["prepared", "inline"]),
    "draft_vocab": st.integers(3, 10**8).map(str),
    "round_rows": st.integers(0, 512).map(str),
    "draft_weights": st.sampled_from(["model", "fp8"]),
    "verify": st.sampled_from(["path-scan", "weaver", "tree-wy"]),
    "suffix": st.sampled_from(["on", "off"]),
    "url": st.sampled_from(
        ["http://127.0.0.1:30000", "https://example.org/x", "http://a:1/v1+http://b:2/v1"]
    ),
    "model": st.sampled_from(["Qwen/Qwen3.5-4B", "m"]),
    "key": st.sampled_from(["OPENAI_API_KEY", "k_2"]),
    "api": st.sampled_from(["completions", "chat"]),
    "extras": st.sampled_from(["on", "off"]),
}


@st.composite
def specs(draw):
    name = draw(st.sampled_from(list(OPTIONS)))
    keys = draw(st.lists(st.sampled_from(list(OPTIONS[name]) or ["x"]), unique=True))
    if "plan" in keys:  # only tree=auto reads one, and it chooses the rest
        return ArmSpec(name, {"tree": "auto", "plan": draw(VALUES["plan"])})
    return ArmSpec(name, {key: draw(VALUES[key]) for key in keys if key in OPTIONS[name]})


@given(specs())
def test_a_spec_reads_back_as_itself(spec):
    assert parse_arm(str(spec)) == spec


def test_all_and_several():
    assert [str(s) for s in parse_arms(["all"])] == list(ALL)
    assert [str(s) for s in parse_arms(["ar mtp-1", "lumotree:suffix=off"])] == [
        "ar",
        "mtp-1",
        "lumotree:suffix=off",
    ]


def test_a_parent_list_may_stand_before_another_option():
    spec = parse_arm("lumotree:tree=-1,0,0,1,suffix=off")
    assert spec.options == {"tree": "-1,0,0,1", "suffix": "off"}


def test_options_have_one_order_so_one_arm_has_one_name():
    one, other = "lumotree:suffix=off,passes=3", "lumotree:passes=3,suffix=off"
    assert str(parse_arm(one)) == str(parse_arm(other)) == other
    assert str(parse_arm("lumotree:suffix=off,tree=-1,0,0")) == "lumotree:tree=-1,0,0,suffix=off"
    with pytest.raises(ArmError, match="named twice"):
        parse_arms([one, other])


def test_credentials_of_an_address_are_refused_and_not_repeated():
    for url in ("http://alice:hunter2@host:1", "alice:hunter2@host", "http://hunter2@host/x"):
        with pytest.raises(ArmError, match="user or password is not taken") as caught:
            parse_arm(f"sglang-eagle:url={url}")
        assert "hunter2" not in str(caught.value)


def test_every_name_has_a_creator_and_options():
    assert list(CREATORS) == list(OPTIONS)
    assert set(IN_PROCESS) == set(OPTIONS) - {"sglang-eagle", "vllm-mtp", "openai"}


def test_a_comma_ends_an_arm_without_options():
    url = "http://127.0.0.1:1/v1"
    named = parse_arms([f"ar,mtp-5,openai:url={url},model=m lumotree"])
    assert [str(s) for s in named] == ["ar", "mtp-5", f"openai:url={url},model=m", "lumotree"]


def test_several_addresses():
    spec = parse_arm("openai:url=http://a:1/v1+http://b/x+y")
    assert spec.values()["url"] == ["http://a:1/v1", "http://b/x+y"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lumotre", "did you mean 'lumotree'"),
        ("trt-llm", "valid arms: all, ar"),
        ("ar,oak", "unknown arm 'oak'"),
        ("openai:api=soap", "it takes completions or chat"),
        ("openai:key=sk-123", "no name of an environment variable"),
        ("openai:url=http://a+http://[", "it takes an address"),
        ("mtp-4", "unknown arm 'mtp-4'"),
        ("lumotree:sufix=on", "did you mean 'suffix'"),
        ("lumotree:suffix=yes", "it takes on or off"),
        ("lumotree:passes=5/3", "whole number from 0 to 16"),
        ("lumotree:attention=flash", "valid values: grouped, stock"),
        ("lumotree:draft_vocab=2", "at least 3"),
        ("lumotree:round_rows=513", "at most 512"),
        ("lumotree:round_rows=032", "at most 512"),
        ("lumotree:round_rows=" + "9" * 5000, "at most 512"),
        ("lumotree:draft_vocab=04096", "at least 3"),
        ("lumotree:draft_vocab=" + "9" * 5000, "at least 3"),
        ("lumotree:verify=weavr", "did you mean 'weaver'"),
        ("lumotree:passes=03", "whole number from 0 to 16"),
        ("lumotree:passes=" + "9" * 5000, "whole number from 0 to 16"),
        ("lumotree:tree=oak", "option 'tree' of arm 'lumotree': unknown tree 'oak'"),
        ("lumotree:tree=root,tree=root", "'tree' twice"),
        ("lumotree:tree=", "has no value"),
        ("lumotree:tree=auto,passes=3", "tree=auto chooses passes itself"),
        ("lumotree:plan=x.json", "plan= belongs to tree=auto"),
        ("lumotree:tree=auto,plan=", "'plan' of arm 'lumotree' has no value"),
        ("lumotree:", "ends in a colon"),
        ("ar:tree=root", "there are no options of ar"),
        ("sglang-eagle:url=localhost", "it takes an address"),
        ("sglang-eagle:url=http://[", "it takes an address"),
        ("", "no arm is named"),
        ("ar ar", "'ar' is named twice"),
        ("all ar", "'ar' is named twice"),
    ],
)
def test_errors_name_the_arm_and_what_is_valid(text, says):
    with pytest.raises(ArmError) as caught:
        parse_arms([text])
    assert says in str(caught.value)
    assert caught.value.exit_code == 2
