"""Write the Hugging Face folder: config, weights in bfloat16, generation config.

python scripts/train/export.py --weights .train/run/final.safetensors
python scripts/train/export.py --random 1          # the shape without training
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from model import Shape, initial, parameter_shapes  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
END_OF_TEXT, IM_START, IM_END = 4089, 4090, 4091


def config(s: Shape, context: int) -> dict:
    """config.json of the checkpoint."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.mlp,
        "num_hidden_layers": s.layers,
        "layer_types": [
            "full_attention" if s.full(i) else "linear_attention" for i in range(s.layers)
        ],
        "full_attention_interval": s.every,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "linear_num_key_heads": s.gdn_heads,
        "linear_num_value_heads": s.gdn_heads,
        "linear_key_head_dim": s.gdn_dim,
        "linear_value_head_dim": s.gdn_dim,
        "linear_conv_kernel_dim": s.conv,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "max_position_embeddings": context,
        "partial_rotary_factor": s.rotary / s.head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": s.theta,
            "partial_rotary_factor": s.rotary / s.head_dim,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
    }


def export(params: dict[str, torch.Tensor], folder: Path, context: int) -> str:
    """Write the folder; return the sha256 of the weights."""
    shape = Shape()
    wanted = parameter_shapes(shape)
    if {k: tuple(v.shape) for k, v in params.items()} != wanted:
        raise ValueError("the weights do not have the embedded model's shape")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: params[k].to(torch.bfloat16).contiguous() for k in sorted(wanted)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(shape, context), indent=2) + "\n")
    generation = {
        "do_sample": False,
        "eos_token_id": [IM_END, END_OF_TEXT],
        "pad_token_id": END_OF_TEXT,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--weights", type=Path)
    source.add_argument("--random", type=int, metavar="SEED")
    parser.add_argument("--out", type=Path, default=ROOT / "lumotree/embedded")
    parser.add_argument("--context", type=int, default=16384)
    args = parser.parse_args()
    params = load_file(args.weights) if args.weights else initial(Shape(), args.random)
    print(export(params, args.out, args.context))


if __name__ == "__main__":
    main()
