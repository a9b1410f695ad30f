"""The model's arithmetic against transformers, and every checkpoint that must be refused."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForCausalLM

from lumotree.engine import Engine
from lumotree.errors import CheckpointError
from lumotree.model.checkpoint import EMBEDDED
from lumotree.model.hybrid import HybridModel
from lumotree.model.runner import RowRunner
from lumotree.model.source import open_source
from tests.core.support import decode, prefill, random_tokens, relative
from tests.tiny import Geometry, oracle_logits, save_tiny

CPU = torch.device("cpu")
LINEAR, FULL = "linear_attention", "full_attention"


def greedy_logits(model, prompt, decoded):
    """Tokens of prompt and greedy continuation, and the logits behind each: prefill, then steps."""
    runner = RowRunner(model, "natural", 4)
    state, rows = prefill(model, prompt, room=decoded + 8)
    tokens, found = list(prompt), [rows]
    for _ in range(decoded):
        tokens.append(int(found[-1][-1].argmax()))
        found.append(decode(model, runner, state, tokens[-1:]))
    return tokens, torch.cat(found)


def own_rounding(oracle, tokens, logits):
    """What float32 alone does to transformers: narrow random heads amplify rounding a lot."""
    return relative(logits, oracle_logits(oracle.double(), tokens))


@st.composite
def geometries(draw) -> Geometry:
    kv_heads, key_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    layers = draw(
        st.one_of(
            st.just([LINEAR, LINEAR, FULL]),
            st.lists(st.sampled_from([LINEAR, FULL]), min_size=1, max_size=4),
        )
    )
    return Geometry(
        hidden=draw(st.sampled_from([16, 24, 32, 40])),
        layers=tuple(layers),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 32])),
        key_heads=key_heads,
        value_heads=key_heads * draw(st.integers(1, 4)),
        key_dim=draw(st.sampled_from([4, 8, 16])),
        value_dim=draw(st.sampled_from([4, 8, 12])),
        mlp=draw(st.sampled_from([20, 48, 64])),
        vocab=draw(st.sampled_from([50, 97, 128])),
        tied=draw(st.booleans()),
        conv=draw(st.sampled_from([4, 4, 2, 3])),
    )


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    geometry=geometries(),
    seed=st.integers(0, 10**6),
    prompt_length=st.integers(1, 140),
    multimodal=st.booleans(),
)
def test_random_geometries_agree_with_transformers(
    tmp_path, geometry, seed, prompt_length, multimodal
):
    """To 1.5e-5, or four times transformers' own float32 error where a draw is ill-conditioned.

    Narrow random layers round more than the named ones below, and how much depends on the CPU.
    """
    oracle = save_tiny(tmp_path, geometry, seed, mtp=False, multimodal=multimodal, gain=0.5)
    model = HybridModel.load(open_source(str(tmp_path)), torch.float32, CPU)
    tokens, ours = greedy_logits(model, random_tokens(seed, prompt_length, geometry.vocab), 64)
    theirs = oracle_logits(oracle, tokens)
    bound = max(1.5e-5, 4 * own_rounding(oracle, tokens, theirs))
    assert bound < 2e-4
    assert relative(ours[:prompt_length], theirs[:prompt_length]) < bound, "prefill"
    assert relative(ours[prompt_length:], theirs[prompt_length:]) < bound, "decode"


WIDE = Geometry(hidden=64, key_dim=32, value_dim=32, head_dim=32, mlp=128)


@pytest.mark.parametrize(
    ("geometry", "prompt_length", "multimodal"),
    [
        pytest.param(replace(WIDE, layers=(LINEAR,) * 3), 70, False, id="only linear layers"),
        pytest.param(replace(WIDE, layers=(FULL,) * 3), 70, False, id="only full layers"),
        pytest.param(
            replace(WIDE, kv_heads=1, value_heads=8), 65, True, id="ratios of 4 and multimodal"
        ),
        pytest.param(replace(WIDE, tied=False), 64, False, id="untied lm_head"),
        pytest.param(WIDE, 1, False, id="prompt of one token"),
        pytest.param(WIDE, 250, False, id="decode crosses a key block"),
        pytest.param(WIDE, 530, False, id="prompt of three chunks"),
    ],
)
def test_wide_heads_agree_with_transformers_to_1e5(tmp_path, geometry, prompt_length, multimodal):
    oracle = save_tiny(tmp_path, geometry, 7, mtp=False, multimodal=multimodal, gain=0.5)
    model = HybridModel.load(open_source(str(tmp_path)), torch.float32, CPU)
    tokens, ours = greedy_logits(model, random_tokens(7, prompt_length, geometry.vocab), 64)
    theirs = oracle_logits(oracle, tokens)
    assert relative(ours[:prompt_length], theirs[:prompt_length]) < 1e-5, "prefill"
    assert relative(ours[prompt_length:], theirs[prompt_length:]) < 1e-5, "decode"


def test_the_embedded_model_agrees_with_transformers_to_1e5():
    oracle = Qwen3_5ForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    model = HybridModel.load(open_source("embedded"), torch.float32, CPU)
    tokens, ours = greedy_logits(model, random_tokens(7, 270, 4000), 64)
    theirs = oracle_logits(oracle, tokens)
    assert relative(ours[:270], theirs[:270]) < 1e-5, "prefill"
    assert relative(ours[270:], theirs[270:]) < 1e-5, "decode"


def test_bfloat16_stays_near_the_float32_oracle(tmp_path):
    """A bound on rounding, not on bits: the casts of the two implementations may differ."""
    oracle = save_tiny(tmp_path, Geometry(), seed=3, mtp=False, dtype=torch.bfloat16)
    tokens = random_tokens(3, 90, 97)
    _, ours = prefill(HybridModel.load(open_source(str(tmp_path)), torch.bfloat16, CPU), tokens)
    theirs = oracle_logits(oracle, tokens).float()
    exact = oracle_logits(oracle.float(), tokens)
    assert relative(ours, exact) < 1.5 * relative(theirs, exact)


def edit_config(**fields):
    """Sets fields of config.json; None removes one."""

    def edit(folder):
        path = folder / "config.json"
        raw = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))

    return edit


def edit_tensors(change):
    def edit(folder):
        path = folder / "model.safetensors"
        tensors = load_file(str(path))
        change(tensors)
        save_file(tensors, str(path))

    return edit


def remove(name):
    return lambda folder: (folder / name).unlink()


def write(name, content):
    return lambda folder: (folder / name).write_text(content)


def reshape(tensors):
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(5, 7)


def quantise(tensors):
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        pytest.param(
            edit_tensors(lambda t: t.pop("model.layers.0.linear_attn.A_log")),
            "model.layers.0.linear_attn.A_log is missing",
            id="missing tensor",
        ),
        pytest.param(
            edit_tensors(lambda t: t.pop("mtp.norm.weight")),
            "mtp.norm.weight",
            id="half an MTP head",
        ),
        pytest.param(
            edit_tensors(lambda t: t.pop("model.embed_tokens.weight")),
            "model.embed_tokens.weight",
            id="no embedding",
        ),
        pytest.param(
            edit_tensors(reshape),
            "down_proj.weight has shape (5, 7), expected (32, 48)",
            id="shape",
        ),
        pytest.param(edit_tensors(quantise), "up_proj.weight is torch.float8", id="float8 weights"),
        pytest.param(edit_config(num_experts=8), "num_experts", id="MoE"),
        pytest.param(
            edit_config(moe_intermediate_size=64), "moe_intermediate_size", id="MoE width"
        ),
        pytest.param(
            edit_config(quantization_config={"quant_method": "fp8"}),
            "quantization_config",
            id="quantised",
        ),
        pytest.param(
            edit_config(model_type="qwen3_next"), "model_type 'qwen3_next'", id="Qwen3-Next"
        ),
        pytest.param(edit_config(model_type=None), "model_type None", id="no model_type"),
        pytest.param(edit_config(hidden_size=None), "hidden_size", id="no hidden_size"),
        pytest.param(edit_config(layer_types=["mamba"] * 3), "layer_types", id="unknown layer"),
        pytest.param(edit_config(layer_types=["full_attention"]), "layer_types", id="layer count"),
        pytest.param(edit_config(attention_bias=True), "attention_bias", id="attention bias"),
        pytest.param(edit_config(hidden_act="gelu"), "hidden_act", id="activation"),
        pytest.param(edit_config(num_key_value_heads=3), "num_key_value_heads", id="head ratio"),
        pytest.param(edit_config(mtp_num_hidden_layers=2), "mtp_num_hidden_layers", id="two heads"),
        pytest.param(
            edit_config(rope_parameters={"rope_type": "yarn", "factor": 4.0}),
            "rope_type",
            id="yarn",
        ),
        pytest.param(remove("config.json"), "config.json", id="no config"),
        pytest.param(
            write("config.json", "{"), "config.json is not valid JSON", id="broken config"
        ),
        pytest.param(remove("model.safetensors"), ".safetensors", id="no safetensors"),
        pytest.param(write("model.safetensors", "no"), "safetensors", id="broken safetensors"),
        pytest.param(
            write(
                "model.safetensors.index.json",
                json.dumps({"weight_map": {"model.norm.weight": "model-00002.safetensors"}}),
            ),
            "model-00002.safetensors",
            id="missing shard",
        ),
    ],
)
def test_a_checkpoint_that_cannot_run_is_refused_in_one_sentence(tmp_path, damage, named):
    save_tiny(tmp_path, Geometry())
    damage(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        Engine.load(str(tmp_path), device="cpu")
    message = caught.value.message
    assert named in message
    assert "\n" not in message and ". " not in message


def test_a_file_is_no_checkpoint(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    with pytest.raises(CheckpointError, match="model.gguf is a file"):
        Engine.load(str(file), device="cpu")


def test_a_folder_that_does_not_exist_is_named():
    with pytest.raises(CheckpointError, match="no such folder: ./nowhere"):
        Engine.load("./nowhere", device="cpu")


def test_a_multimodal_config_is_read_from_its_text_part(tmp_path):
    save_tiny(tmp_path, Geometry(), multimodal=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["text_config"]["num_experts"] = 4
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="num_experts"):
        Engine.load(str(tmp_path), device="cpu")
