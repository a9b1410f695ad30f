"""tree=auto: calibration on the embedded model, and how an arm gets and keeps its choice."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from arms import inprocess
from arms.choice import TreeChoice
from arms.spec import parse_arm
from lumotree.decoder import DecoderConfig
from lumotree.errors import ArmError
from replay.calibration import calibrate
from replay.cli import app
from replay.corpus import load_corpus
from replay.job import ReplayOptions, make_items
from replay.runfolder import RunFolder
from tests.replay.fakes import FakeEngine, corpus_lines, install, write_corpus

CHOICE = TreeChoice("chain-2", 2, False, 90.0, 2.5, 27.7, "w1", "cpu")


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_corpus(tmp_path / "c.jsonl", corpus_lines())


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def calibrated(monkeypatch):
    """A fake engine and a calibration that counts its calls."""
    install(FakeEngine(), monkeypatch)
    calls = []

    def stand_in(engine, items, **options):
        calls.append(len(items))
        return SimpleNamespace(choice=CHOICE)

    monkeypatch.setattr("replay.calibration.calibrate", stand_in)
    return calls


def test_a_replay_calibrates_once_and_records_the_choice(corpus, calibrated):
    done = call("replay", corpus, "--arms", "ar lumotree:tree=auto", "--cap", 9, "--out", "r")
    assert done.exit_code == 0, done.output
    assert calibrated == [6]
    arm = RunFolder.open(corpus.parent / "r").run["arms"]["lumotree:tree=auto"]
    assert TreeChoice.of(arm["description"]["choice"], "here") == CHOICE
    summary = RunFolder.open(corpus.parent / "r").summary()
    assert [entry["arm"] for entry in summary["comparisons"]] == ["lumotree:tree=auto"]


def test_a_resume_keeps_the_choice(corpus, calibrated):
    call("replay", corpus, "--arms", "ar lumotree:tree=auto", "--cap", 9, "--out", "r")
    done = call("replay", "--resume", "r")
    assert done.exit_code == 0, done.output
    assert len(calibrated) == 1


def test_without_auto_nothing_is_calibrated(corpus, calibrated):
    call("replay", corpus, "--arms", "ar lumotree", "--cap", 9, "--out", "r")
    assert calibrated == []


def test_a_plan_file_replaces_the_calibration(corpus, calibrated, tmp_path):
    (tmp_path / "map.json").write_text(json.dumps({"choice": CHOICE.as_dict()}))
    arm = "lumotree:tree=auto,plan=map.json"
    done = call("replay", corpus, "--arms", f"ar {arm}", "--cap", 9, "--out", "r")
    assert done.exit_code == 0 and calibrated == []
    description = RunFolder.open(tmp_path / "r").run["arms"][arm]["description"]
    assert description["choice"]["tree"] == "chain-2"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("{}", "holds no tree choice"),
        (json.dumps({"choice": CHOICE.as_dict() | {"tree": "oak"}}), "holds no tree choice"),
        (json.dumps({"choice": CHOICE.as_dict() | {"weights_sha256": "x"}}), "another weights"),
        (json.dumps({"choice": CHOICE.as_dict() | {"device": "cuda"}}), "another device"),
    ],
)
def test_a_bad_plan_is_a_row_that_says_why(corpus, calibrated, tmp_path, content, says):
    if content is not None:
        (tmp_path / "map.json").write_text(content)
    done = call(
        "replay", corpus, "--arms", "ar lumotree:tree=auto,plan=map.json", "--cap", 9, "--out", "r",
        "--json",
    )  # fmt: skip
    arm = json.loads(done.stdout)["arms"]["lumotree:tree=auto,plan=map.json"]
    assert arm["status"] == "unavailable" and says in arm["reason"]


def test_an_arm_without_a_calibration_says_how_to_get_one():
    arm = inprocess.InProcessArm(parse_arm("lumotree:tree=auto"), FakeEngine())
    assert arm.needs_choice
    with pytest.raises(ArmError, match="has no calibration") as caught:
        arm.start()
    assert "lumotree breakeven" in caught.value.hint


def test_the_choice_is_the_decoders_configuration():
    made = []
    engine = SimpleNamespace(
        description=lambda: {"weights_sha256": "w1", "device": "cpu"}, decoder=made.append
    )
    arm = inprocess.InProcessArm(parse_arm("lumotree:tree=auto"), engine)
    arm.choice = CHOICE
    description = arm.start()
    assert made == [DecoderConfig("chain-2", 2, False)]
    assert (description["tree"], description["passes"]) == ("chain-2", 2)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    path = write_corpus(tmp_path_factory.mktemp("c") / "c.jsonl", corpus_lines(2, 2))
    engine = inprocess.load_engine("embedded")
    options = ReplayOptions(corpus=str(path), arms=("ar",), cap=24)
    items = make_items(load_corpus(path), options, engine)
    return engine, items, calibrate(engine, items, requests=2, tokens=24)


def test_recorded_shares_agree_with_the_decoders_counts(calibration):
    engine, items, found = calibration
    by_design = {(r.tree, r.passes): r for r in found.measured}
    root = by_design["root", 0]
    assert root.reach == root.active == (1.0,)
    for reach in found.measured:
        assert reach.steps > 0 and len(reach.reach) == len(reach.active)
        assert reach.reach[0] == reach.active[0] == 1
        assert all(r <= a for r, a in zip(reach.reach, reach.active, strict=True))


def test_the_choice_is_the_first_candidate_and_decodes_the_same_tokens(calibration):
    engine, items, found = calibration
    best, choice = found.ranked[0], found.choice
    assert (choice.tree, choice.passes, choice.predicted_tok_s) == (
        best.tree,
        best.passes,
        best.tok_s,
    )
    choice.check(engine.description())
    arm = inprocess.InProcessArm(parse_arm("lumotree:tree=auto"), engine)
    arm.choice = choice
    arm.start()
    plain = inprocess.InProcessArm(parse_arm("ar"), engine)
    plain.start()
    for item in items[:2]:
        assert (
            arm.run(item.request, item.params).token_ids
            == plain.run(item.request, item.params).token_ids
        )
    json.dumps(found.as_dict())
