"""A vision tower of one tiny layer with random weights.

Servers that know the family only as `Qwen3_5ForConditionalGeneration` want one; text never
passes through it. Names are those of the published multimodal checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HIDDEN, HEADS, MLP, PATCH, MERGE, POSITIONS = 128, 2, 256, 16, 2, 16
PREFIX = "model.visual."


def vision_config(text_hidden: int) -> dict[str, Any]:
    """`vision_config` of a multimodal config.json; images come out `text_hidden` wide."""
    return {
        "model_type": "qwen3_5",
        "depth": 1,
        "hidden_size": HIDDEN,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": MLP,
        "num_heads": HEADS,
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": text_hidden,
        "num_position_embeddings": POSITIONS,
        "deepstack_visual_indexes": [],
        "initializer_range": 0.02,
    }


def vision_tensors(text_hidden: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights and zero biases on the CPU by their full names."""
    block, merged = "blocks.0.", HIDDEN * MERGE**2
    shapes = {
        "patch_embed.proj.weight": (HIDDEN, 3, 2, PATCH, PATCH),
        "patch_embed.proj.bias": (HIDDEN,),
        "pos_embed.weight": (POSITIONS, HIDDEN),
        f"{block}attn.qkv.weight": (3 * HIDDEN, HIDDEN),
        f"{block}attn.qkv.bias": (3 * HIDDEN,),
        f"{block}attn.proj.weight": (HIDDEN, HIDDEN),
        f"{block}attn.proj.bias": (HIDDEN,),
        f"{block}mlp.linear_fc1.weight": (MLP, HIDDEN),
        f"{block}mlp.linear_fc1.bias": (MLP,),
        f"{block}mlp.linear_fc2.weight": (HIDDEN, MLP),
        f"{block}mlp.linear_fc2.bias": (HIDDEN,),
        "merger.linear_fc1.weight": (merged, merged),
        "merger.linear_fc1.bias": (merged,),
        "merger.linear_fc2.weight": (text_hidden, merged),
        "merger.linear_fc2.bias": (text_hidden,),
    }
    norms = (f"{block}norm1", f"{block}norm2", "merger.norm")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.zeros(shape)
        if name.endswith("bias")
        else torch.empty(shape).normal_(0.0, 0.02, generator=generator)
        for name, shape in shapes.items()
    }
    for norm in norms:
        tensors[f"{norm}.weight"] = torch.ones(HIDDEN)
        tensors[f"{norm}.bias"] = torch.zeros(HIDDEN)
    return {PREFIX + name: tensor.to(dtype) for name, tensor in tensors.items()}
