"""Names and shapes of the tensors of a dense Qwen3.5-family checkpoint with an MTP head."""

from __future__ import annotations

from lumotree.model.config import ModelConfig

TRUNK = "model."
Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: ModelConfig, mtp: bool) -> Shapes:
    """Every tensor that a model of this config reads, in the order of a forward.

    A tied checkpoint has no lm_head.weight. Names are those of text-only checkpoints.
    """
    h, vocab = config.hidden_size, config.vocab_size
    shapes: Shapes = {f"{TRUNK}embed_tokens.weight": (vocab, h)}
    for i, kind in enumerate(config.layer_types):
        shapes |= _below(f"{TRUNK}layers.{i}.", layer_shapes(config, kind))
    shapes[f"{TRUNK}norm.weight"] = (h,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, h)
    if mtp:
        shapes |= _below("mtp.", _mtp_shapes(config))
    return shapes


def layer_shapes(config: ModelConfig, kind: str) -> Shapes:
    """One decoder layer, names below the layer's own prefix."""
    h, mlp = config.hidden_size, config.intermediate_size
    mixer = {
        "linear_attention": ("linear_attn.", _delta_shapes),
        "full_attention": ("self_attn.", _attention_shapes),
    }[kind]
    return {
        "input_layernorm.weight": (h,),
        **_below(mixer[0], mixer[1](config)),
        "post_attention_layernorm.weight": (h,),
        "mlp.gate_proj.weight": (mlp, h),
        "mlp.up_proj.weight": (mlp, h),
        "mlp.down_proj.weight": (h, mlp),
    }


def _delta_shapes(config: ModelConfig) -> Shapes:
    h, heads = config.hidden_size, config.linear_num_value_heads
    return {
        "in_proj_qkv.weight": (config.conv_dim, h),
        "in_proj_z.weight": (config.value_dim, h),
        "in_proj_b.weight": (heads, h),
        "in_proj_a.weight": (heads, h),
        "conv1d.weight": (config.conv_dim, 1, config.conv_kernel),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (config.linear_value_head_dim,),
        "out_proj.weight": (h, config.value_dim),
    }


def _attention_shapes(config: ModelConfig) -> Shapes:
    h, d = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return {
        "q_proj.weight": (2 * heads * d, h),
        "k_proj.weight": (kv_heads * d, h),
        "v_proj.weight": (kv_heads * d, h),
        "q_norm.weight": (d,),
        "k_norm.weight": (d,),
        "o_proj.weight": (h, heads * d),
    }


def _mtp_shapes(config: ModelConfig) -> Shapes:
    h = config.hidden_size
    return {
        "pre_fc_norm_embedding.weight": (h,),
        "pre_fc_norm_hidden.weight": (h,),
        "fc.weight": (h, 2 * h),
        **_below("layers.0.", layer_shapes(config, "full_attention")),
        "norm.weight": (h,),
    }


def _below(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}
