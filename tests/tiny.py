"""Tiny random checkpoints in the published format, and transformers as the oracle over them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from lumotree.model.checkpoint import EMBEDDED

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class Geometry:
    """A random small member of the family; widths multiply head counts by small head sizes."""

    hidden: int = 32
    layers: tuple[str, ...] = ("linear_attention", "linear_attention", "full_attention")
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 8
    value_dim: int = 8
    mlp: int = 48
    vocab: int = 97
    tied: bool = True
    conv: int = 4

    def config(self) -> Qwen3_5TextConfig:
        return Qwen3_5TextConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=len(self.layers),
            layer_types=list(self.layers),
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            linear_num_key_heads=self.key_heads,
            linear_num_value_heads=self.value_heads,
            linear_key_head_dim=self.key_dim,
            linear_value_head_dim=self.value_dim,
            linear_conv_kernel_dim=self.conv,
            tie_word_embeddings=self.tied,
            max_position_embeddings=4096,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 2],
                "mrope_interleaved": True,
            },
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )


def save_tiny(
    folder: Path,
    geometry: Geometry,
    seed: int = 0,
    mtp: bool = True,
    multimodal: bool = False,
    dtype: torch.dtype = torch.float32,
    gain: float = 1.5,
) -> Qwen3_5ForCausalLM:
    """Writes a random checkpoint and returns the transformers model that owns its weights.

    Weights are several times the usual initial size, so that every term of the arithmetic shows;
    a lower `gain` amplifies rounding less.
    """
    torch.manual_seed(seed)
    config = geometry.config()
    config._attn_implementation = "eager"
    model = Qwen3_5ForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = 0.3 if "norm" in name else gain / max(weight.shape[-1], 4) ** 0.5
            if name.endswith(("A_log", "dt_bias")):
                weight.normal_(0.0, 0.7)
            elif name.endswith("linear_attn.norm.weight"):
                weight.normal_(1.0, 0.3)
            else:
                weight.normal_(0.0, spread)
    tensors = {
        name: tensor.detach().clone().contiguous()
        for name, tensor in model.state_dict().items()
        if not (geometry.tied and name == "lm_head.weight")
    }
    if multimodal:
        tensors = {
            name.replace("model.", "model.language_model.", 1): tensor
            for name, tensor in tensors.items()
        }
    if mtp:
        tensors |= random_mtp(geometry, dtype)
    raw = json.loads(config.to_json_string(use_diff=False))
    raw["dtype"] = str(dtype).removeprefix("torch.")
    if multimodal:
        raw = {"model_type": "qwen3_5", "text_config": raw}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, str(folder / "model.safetensors"))
    return model


def save_speaking(folder: Path, mtp: bool = True) -> None:
    """A random three-layer checkpoint with the embedded model's tokenizer: it serves requests."""
    save_tiny(folder, Geometry(vocab=4096), mtp=mtp)
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED / name, folder / name)


def random_mtp(geometry: Geometry, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    g = geometry
    shapes = {
        "fc.weight": (g.hidden, 2 * g.hidden),
        "pre_fc_norm_embedding.weight": (g.hidden,),
        "pre_fc_norm_hidden.weight": (g.hidden,),
        "norm.weight": (g.hidden,),
        "layers.0.input_layernorm.weight": (g.hidden,),
        "layers.0.post_attention_layernorm.weight": (g.hidden,),
        "layers.0.self_attn.q_proj.weight": (2 * g.heads * g.head_dim, g.hidden),
        "layers.0.self_attn.k_proj.weight": (g.kv_heads * g.head_dim, g.hidden),
        "layers.0.self_attn.v_proj.weight": (g.kv_heads * g.head_dim, g.hidden),
        "layers.0.self_attn.o_proj.weight": (g.hidden, g.heads * g.head_dim),
        "layers.0.self_attn.q_norm.weight": (g.head_dim,),
        "layers.0.self_attn.k_norm.weight": (g.head_dim,),
        "layers.0.mlp.gate_proj.weight": (g.mlp, g.hidden),
        "layers.0.mlp.up_proj.weight": (g.mlp, g.hidden),
        "layers.0.mlp.down_proj.weight": (g.hidden, g.mlp),
    }
    return {
        f"mtp.{name}": torch.randn(shape)
        .mul(0.3 if len(shape) == 1 else shape[-1] ** -0.5)
        .to(dtype)
        for name, shape in shapes.items()
    }


@torch.no_grad()
def oracle_logits(model: Qwen3_5ForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """[n, vocab] logits of one forward from scratch: no cache, hence no cache state to distrust."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0]
