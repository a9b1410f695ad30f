"""The text config of a dense Qwen3.5-family checkpoint, read strictly.

Field names and defaults follow the published config.json files; what this decoder cannot run
is refused by naming the field, never guessed at.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lumotree.errors import CheckpointError

SUPPORTED_MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
LAYER_KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class ModelConfig:
    """Geometry of one model. Widths are in elements, `rope_theta` is the rotary base."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    conv_kernel: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    mtp_layers: int

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels under the causal convolution: q, k and v of a GDN layer, in that order."""
        return 2 * self.key_dim + self.value_dim

    @property
    def num_linear_layers(self) -> int:
        return self.layer_types.count("linear_attention")

    @property
    def num_full_layers(self) -> int:
        return self.layer_types.count("full_attention")

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Reads `config.json` of a Hugging Face folder. Raises CheckpointError."""
        path = folder / "config.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} is no checkpoint: it has no config.json",
                "give a Hugging Face folder, a hub id, or leave --model out for the embedded model",
            )
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], where: str = "config.json") -> ModelConfig:
        """Raises CheckpointError naming the first field that is missing or unsupported."""
        text = raw.get("text_config", raw) if isinstance(raw, dict) else raw
        for config in (raw, text):
            if not isinstance(config, dict):
                raise CheckpointError(f"{where}: a model config must be a JSON object")
            _refuse_unsupported(config, where)

        def number(name: str, default: float | None = None, kind: type = int) -> Any:
            value = text.get(name)
            value = default if value is None else value
            if value is None:
                raise CheckpointError(f"{where} lacks the field {name}")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                raise CheckpointError(f"{where}: {name} is {value!r}, which is no count")
            return kind(value)

        layers = number("num_hidden_layers")
        interval = text.get("full_attention_interval") or 4
        kinds = text.get("layer_types") or [
            LAYER_KINDS[(i + 1) % interval == 0] for i in range(layers)
        ]
        if len(kinds) != layers or set(kinds) - set(LAYER_KINDS):
            raise CheckpointError(
                f"{where}: layer_types must be {layers} of {' or '.join(LAYER_KINDS)}"
            )
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        rope_kind = rope.get("rope_type", rope.get("type", "default"))
        if rope_kind not in ("default", "mrope"):
            raise CheckpointError(
                f"{where}: rope_parameters.rope_type {rope_kind!r} is not supported",
                "only the default rotary embedding is",
            )
        heads = number("num_attention_heads")
        head_dim = text.get("head_dim") or number("hidden_size") // max(heads, 1)
        partial = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
        config = cls(
            vocab_size=number("vocab_size"),
            hidden_size=number("hidden_size"),
            intermediate_size=number("intermediate_size"),
            layer_types=tuple(kinds),
            num_attention_heads=heads,
            num_key_value_heads=number("num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=int(head_dim * partial),
            rope_theta=float(rope.get("rope_theta", text.get("rope_theta", 1e7))),
            linear_num_key_heads=number("linear_num_key_heads"),
            linear_num_value_heads=number("linear_num_value_heads"),
            linear_key_head_dim=number("linear_key_head_dim"),
            linear_value_head_dim=number("linear_value_head_dim"),
            conv_kernel=number("linear_conv_kernel_dim", 4),
            rms_norm_eps=number("rms_norm_eps", 1e-6, float),
            tie_word_embeddings=bool(
                text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))
            ),
            max_position_embeddings=number("max_position_embeddings", 32768),
            mtp_layers=number("mtp_num_hidden_layers", 1),
        )
        config._check_ratios(where)
        return config

    def _check_ratios(self, where: str) -> None:
        for many, few in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if not getattr(self, few) or not getattr(self, many):
                raise CheckpointError(f"{where}: {many} and {few} must be at least 1")
            if getattr(self, many) % getattr(self, few):
                raise CheckpointError(f"{where}: {many} must be a multiple of {few}")
        if self.rotary_dim % 2:
            raise CheckpointError(f"{where}: partial_rotary_factor leaves an odd rotary width")
        if self.mtp_layers > 1:
            raise CheckpointError(
                f"{where}: mtp_num_hidden_layers {self.mtp_layers} is not supported", "only 1 is"
            )


def _refuse_unsupported(config: dict[str, Any], where: str) -> None:
    """Fields of sibling models whose arithmetic differs: each is one clear refusal."""
    kind = config.get("model_type")
    if kind not in SUPPORTED_MODEL_TYPES:
        raise CheckpointError(
            f"{where}: model_type {kind!r} is not supported",
            f"supported: {', '.join(SUPPORTED_MODEL_TYPES)} (dense Qwen3.5, 3.6, 3.8)",
        )
    for field in ("num_experts", "num_local_experts", "moe_intermediate_size"):
        if config.get(field):
            raise CheckpointError(
                f"{where}: {field} {config[field]} means a mixture of experts, "
                "which is not supported"
            )
    for field in ("quantization_config", "compression_config"):
        if config.get(field):
            raise CheckpointError(
                f"{where}: {field} means quantised weights, which are not supported",
                "use the bf16 or fp32 checkpoint",
            )
    for field, only in (
        ("attention_bias", False),
        ("hidden_act", "silu"),
        ("attn_output_gate", True),
        ("mtp_use_dedicated_embeddings", False),
    ):
        if config.get(field, only) != only:
            raise CheckpointError(
                f"{where}: {field} {config[field]!r} is not supported, only {only!r}"
            )
