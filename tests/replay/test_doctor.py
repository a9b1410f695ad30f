"""What `lumotree doctor` finds, with and without a GPU, with and without Triton."""

import json
import shlex
import sys

import pytest
import torch
from typer.testing import CliRunner

from lumotree.model.hybrid import HybridModel
from lumotree.model.source import open_source
from replay import doctor, launching
from replay.cli import app
from replay.doctor_text import text
from tests.tiny import Geometry, save_tiny

GIB = 2**30
CPU = torch.device("cpu")


def gpu(total_gib, capability="9.0"):
    return {
        "name": "Made-up GPU",
        "capability": capability,
        "multiprocessors": 132,
        "shared_bytes_per_block": 227 * 1024,
        "registers_per_multiprocessor": 65536,
        "l2_bytes": 50 * 2**20,
        "total_bytes": int(total_gib * GIB),
        "free_bytes": int(total_gib * GIB),
    }


def run(*words):
    return CliRunner().invoke(app, ["doctor", "--device", "cpu", *words])


def test_the_text_names_every_model_and_both_servers():
    done = run("--context", "4096")
    assert done.exit_code == 0, done.stderr
    for word in ("Machine", "torch reference operations", "--probe", "sglang.launch_server"):
        assert word in done.stdout
    for name in ("embedded", "rehearsal:27b", "rehearsal:0.8b"):
        line = next(row for row in done.stdout.splitlines() if row.strip().startswith(name + " "))
        assert "4096" in line and ("GiB" in line or "MiB" in line)


def test_json_has_the_figures_behind_it():
    done = run("--model", "rehearsal:27b", "--context", "2048", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    first = found["models"][0]
    assert first["name"] == "rehearsal:27b" and "cost of the 27B shape" in first["label"]
    assert 100 * GIB < first["weights_bytes"] < 110 * GIB, "27 billion weights of 4 bytes"
    assert found["kernels"]["path"] == "torch" and found["kernels"]["launches"] == {}
    assert found["probe"] is None and found["machine"]["gpus"] == []
    assert {"python", "torch", "transformers"} <= found["versions"].keys()
    assert [entry["arm"] for entry in found["external"]] == ["sglang-eagle", "vllm-mtp"]
    assert len({model["name"] for model in found["models"]}) == len(found["models"])


def test_it_works_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    done = run("--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kernels"]["why"] == "the package triton is not installed"
    assert next(p for p in found["packages"] if p["name"] == "triton")["version"] is None


def test_weights_and_state_are_those_of_a_loaded_model(tmp_path):
    save_tiny(tmp_path, Geometry(tied=False))
    source = open_source(str(tmp_path))
    model = HybridModel.load(source, torch.float32, CPU)
    about = doctor.about_model(source, 100, CPU, torch.float32, free=10 * GIB)
    state = model.new_state(100 + doctor.MAX_ROWS, mtp=True)
    sides = [s for c in (state.kv, state.mtp_kv) for s in (c.keys, c.values)]
    held = sum(t.numel() * t.element_size() for t in (state.recurrent, state.conv, *sides))
    assert about["state_bytes"] == held
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert 0 < stored - about["weights_bytes"] < 20_000, "a safetensors header more"
    assert about["fits"] and about["most_context"] == source.config.max_position_embeddings


def test_a_model_that_does_not_fit_says_how_much_would():
    source = open_source("rehearsal:27b")
    weights = doctor.about_model(source, 1, CPU, torch.float32, free=0)["weights_bytes"]
    none = doctor.about_model(source, 32768, CPU, torch.float32, free=weights)
    assert not none["fits"] and none["most_context"] == 0
    free = int((weights + 3 * GIB) / doctor.FITS)
    some = doctor.about_model(source, 131072, CPU, torch.float32, free=free)
    assert not some["fits"] and 0 < some["most_context"] < 131072
    again = doctor.about_model(source, some["most_context"], CPU, torch.float32, free=free)
    assert again["fits"]
    more = doctor.about_model(source, some["most_context"] + 64, CPU, torch.float32, free=free)
    assert not more["fits"]


@pytest.mark.parametrize(
    ("gpus", "parallel", "hindrance"),
    [
        ([gpu(140)], 1, None),
        ([gpu(80, "8.0")], 1, None),
        ([gpu(48)] * 2, 2, None),
        ([gpu(24)] * 2, 4, "needs 4 GPUs like these, 2 found"),
        ([gpu(8)], None, "too large for 8 GPUs like these"),
        ([], 1, "no CUDA device here"),
    ],
)
def test_servers_of_a_large_model_spread_over_gpus(gpus, parallel, hindrance):
    source = open_source("rehearsal:27b")
    weights = doctor.weight_bytes(source, torch.bfloat16)
    sglang, vllm = launching.launches(source, 16384, weights, gpus)
    for entry, option in ((sglang, "--tp-size"), (vllm, "--tensor-parallel-size")):
        assert entry["tensor_parallel"] == parallel
        assert (hindrance is None) or hindrance in entry["hindrances"]
        words = shlex.split(entry["launch"])
        spread = words[words.index(option) + 1] if option in words else "1"
        assert spread == str(parallel or 1)
        assert "16384" in words and "rehearsal-27b-export" in words
        assert entry["prepare"] == "lumotree model export rehearsal:27b rehearsal-27b-export"
        assert f"{entry['arm']}:url=http://127.0.0.1:" in entry["use"]
    backend = shlex.split(sglang["launch"])
    chosen = backend[backend.index("--attention-backend") + 1]
    assert chosen == ("fa3" if gpus and gpus[0]["capability"] == "9.0" else "triton")
    drafts = shlex.split(vllm["launch"])
    drafts = json.loads(drafts[drafts.index("--speculative-config") + 1])
    assert drafts["method"] == "mtp" and drafts["num_speculative_tokens"] > 0


def test_a_multimodal_folder_is_served_as_it_is(tmp_path):
    save_tiny(tmp_path, Geometry(), multimodal=True)
    source = open_source(str(tmp_path))
    for entry in launching.launches(source, 1024, 1000, [gpu(24)]):
        assert entry["prepare"] is None and str(tmp_path) in entry["launch"]


def test_drafts_of_a_checkpoint_without_a_head_are_a_hindrance(tmp_path):
    save_tiny(tmp_path, Geometry(), mtp=False)
    for entry in launching.launches(open_source(str(tmp_path)), 1024, 1000, [gpu(24)]):
        assert "the checkpoint has no mtp.* tensors to draft with" in entry["hindrances"]


def test_a_gpu_and_its_kernels_are_described(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(doctor, "graphics", lambda: [gpu(140)])
    monkeypatch.setattr(doctor, "has_kernels", lambda device: True)
    found = doctor.examine("rehearsal:27b", context=4096, device="cpu", dtype="bfloat16")
    assert found["kernels"]["launches"].keys() >= {"gdn", "attention"}
    assert found["kernels"]["launches"]["gdn"]["block"] > 0
    said = text(found)
    assert "132 multiprocessors" in said and "227 KiB shared memory" in said
    assert "Triton kernels" in said and "gdn: block" in said
    weights = found["models"][0]["weights_bytes"]
    assert 53e9 < weights < 56e9, "27 billion weights of 2 bytes, an MTP head beside them"


def test_the_probe_loads_the_model_or_says_why_not(tmp_path, monkeypatch):
    save_tiny(tmp_path, Geometry(vocab=4096, conv=4))
    found = doctor.probe_model(str(tmp_path), CPU, "float32")
    assert found["equal_bits"] in (True, False) and found["equal_bits_probed_rows"] > 0
    (tmp_path / "model.safetensors").unlink()
    assert "no .safetensors" in doctor.probe_model(str(tmp_path), CPU, "float32")["error"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dtype", "int8"), "--dtype 'int8'"),
        (("--model", "rehearsal:1t"), "unknown rehearsal"),
        (("--model", "/nowhere/at/all"), "no such folder"),
    ],
)
def test_wrong_use_is_one_sentence(words, said):
    done = run(*words)
    assert done.exit_code == 2 and said in done.stderr
