"""Exported folders hold the function of the model: our loader and transformers agree on it."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen3_5ForConditionalGeneration

from lumotree.errors import LumoTreeError
from lumotree.model import export
from lumotree.model.export import export_model
from lumotree.model.hybrid import HybridModel
from lumotree.model.names import tensor_shapes
from lumotree.model.source import open_source
from lumotree.model.vision import PREFIX, vision_tensors
from tests.core.support import prefill
from tests.tiny import Geometry, oracle_logits, save_tiny

CPU = torch.device("cpu")
TEXT = [17, 4000, 301, 5, 5, 88, 921, 2048, 11, 640, 31]


def logits(source, tokens=TEXT):
    model = HybridModel.load(source, torch.float32, CPU)
    return prefill(model, tokens, room=8)[1]


def load(folder, wrapper):
    kind = {"text": AutoModelForCausalLM, "multimodal": Qwen3_5ForConditionalGeneration}[wrapper]
    model, info = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


@pytest.mark.parametrize("wrapper", export.WRAPPERS)
def test_the_embedded_model_survives_export(tmp_path, wrapper):
    source = open_source("embedded")
    files = export_model(source, tmp_path / "out", wrapper=wrapper, device=CPU)
    again = open_source(str(tmp_path / "out"))
    assert again.config == source.config and again.has_mtp()
    ours = logits(source)
    assert torch.equal(logits(again), ours), "bfloat16 weights are the same bits"
    theirs = oracle_logits(load(tmp_path / "out", wrapper), TEXT)
    assert (theirs - ours).abs().max() < 1e-3
    assert {path.name for path in files} == {p.name for p in (tmp_path / "out").iterdir()}
    assert not (tmp_path / "out" / "lumotree.json").exists()


def test_a_rehearsal_is_served_by_others_as_the_embedded_model(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 100 * 2**20)
    source = open_source("rehearsal:tiny")
    export_model(source, tmp_path, wrapper="multimodal", device=CPU)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    small = logits(open_source("embedded"))
    theirs = oracle_logits(load(tmp_path, "multimodal"), TEXT)
    assert (theirs[:, : small.shape[1]] - small).abs().max() < 1e-3
    assert (theirs[:, small.shape[1] :].amax(-1) < small.amax(-1) - 60).all()
    again = open_source(str(tmp_path))
    assert again.config == source.config and again.has_mtp()
    assert (logits(again)[:, : small.shape[1]] - small).abs().max() < 1e-3
    about = json.loads((tmp_path / "lumotree.json").read_text())
    assert about["model"] == "rehearsal:tiny" and "cost of the TINY shape" in about["label"]


def test_the_config_says_what_the_folder_holds(tmp_path):
    source = open_source("embedded")
    export_model(source, tmp_path / "out", wrapper="multimodal", device=CPU)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert raw["text_config"]["mtp_num_hidden_layers"] == 1
    assert raw["vision_config"]["out_hidden_size"] == source.config.hidden_size
    special = [raw[f"{kind}_token_id"] for kind in ("image", "video", "vision_start", "vision_end")]
    assert len(set(special)) == 4 and min(special) >= 4096, "no text of the tokenizer holds one"
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = {name.replace("model.language_model.", "model.") for name in file.keys()}  # noqa: SIM118
    vision = vision_tensors(source.config.hidden_size, torch.bfloat16)
    assert names == {*tensor_shapes(source.config, mtp=True), *vision}
    assert all(name.startswith(PREFIX) for name in vision)


def test_what_bfloat16_cannot_hold_of_vectors_stays_float32(tmp_path):
    save_tiny(tmp_path / "in", Geometry(), dtype=torch.float32, mtp=False)
    source = open_source(str(tmp_path / "in"))
    for dtype in (torch.float32, torch.bfloat16):
        out = tmp_path / str(dtype)
        export_model(source, out, wrapper="text", dtype=dtype, device=CPU)
        with safe_open(out / "model.safetensors", "pt") as file:
            assert file.get_tensor("model.norm.weight").dtype == torch.float32
            assert file.get_tensor("model.embed_tokens.weight").dtype == dtype
    tokens = [5, 0, 96, 41]
    exact = open_source(str(tmp_path / str(torch.float32)))
    assert torch.equal(logits(exact, tokens), logits(source, tokens))


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LumoTreeError, match="is not empty"):
        export_model(open_source("embedded"), tmp_path, device=CPU)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_an_export_that_breaks_off_is_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 2**20)

    def fail(name, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_model(open_source("embedded"), tmp_path / "out", device=CPU, note=fail)
    with pytest.raises(LumoTreeError, match="config.json"):
        open_source(str(tmp_path / "out"))
