"""The published arithmetic in float64, one token at a time, straight from a checkpoint's tensors.

Shares no code with the package: whatever it agrees with was computed another way.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


@dataclass
class Trace:
    """One run over a sequence: rows by position, states after the last one."""

    before_norm: Tensor
    hidden: Tensor
    logits: Tensor
    recurrent: list[Tensor]
    conv_inputs: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]


class Exact:
    def __init__(self, folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        self.c = raw.get("text_config", raw)
        self.w = {k: v.double() for k, v in load_file(str(folder / "model.safetensors")).items()}
        self.eps = self.c["rms_norm_eps"]
        self.embedding = self.w["model.embed_tokens.weight"]
        self.head = self.w.get("lm_head.weight", self.embedding)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * (1 + self.w[name])

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        rope = self.c["rope_parameters"]
        width = int(self.c["head_dim"] * rope["partial_rotary_factor"])
        half = width // 2
        out = x.clone()
        for i in range(half):
            angle = positions.double() * rope["rope_theta"] ** (-2 * i / width)
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            out[..., i] = x[..., i] * cos - x[..., i + half] * sin
            out[..., i + half] = x[..., i + half] * cos + x[..., i] * sin
        return out

    def attention(self, x: Tensor, name: str, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, hidden], every row seeing the rows before it and itself."""
        c, n, d = self.c, x.shape[0], self.c["head_dim"]
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        q_gate = (x @ self.w[name + "q_proj.weight"].T).view(n, heads, 2, d)
        k = (x @ self.w[name + "k_proj.weight"].T).view(n, kv_heads, d)
        v = (x @ self.w[name + "v_proj.weight"].T).view(n, kv_heads, d)
        q = self.rotate(self.norm(q_gate[:, :, 0], name + "q_norm.weight"), positions)
        k = self.rotate(self.norm(k, name + "k_norm.weight"), positions)
        out = torch.empty_like(q)
        for h in range(heads):
            kv = h // (heads // kv_heads)
            scores = q[:, h] @ k[:, kv].T / d**0.5
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
            out[:, h] = scores.softmax(-1) @ v[:, kv]
        gated = (out * torch.sigmoid(q_gate[:, :, 1])).flatten(1)
        return gated @ self.w[name + "o_proj.weight"].T, k, v

    def delta_net(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        c, n = self.c, x.shape[0]
        kh, vh = c["linear_num_key_heads"], c["linear_num_value_heads"]
        dk, dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
        qkv, z, b, a = (x @ self.w[f"{name}in_proj_{p}.weight"].T for p in ("qkv", "z", "b", "a"))
        taps = self.w[name + "conv1d.weight"][:, 0]
        width = taps.shape[1]
        padded = torch.cat((qkv.new_zeros(width - 1, qkv.shape[1]), qkv))
        mixed = F.silu(torch.stack([(padded[t : t + width] * taps.T).sum(0) for t in range(n)]))
        q, k, v = mixed.split((kh * dk, kh * dk, vh * dv), dim=-1)
        q, k = (t.view(n, kh, dk) / (t.view(n, kh, dk).pow(2).sum(-1, True) + 1e-6).sqrt()
                for t in (q, k))  # fmt: skip
        v = v.view(n, vh, dv)
        beta = torch.sigmoid(b)
        decay = (-self.w[name + "A_log"].exp() * F.softplus(a + self.w[name + "dt_bias"])).exp()
        state = x.new_zeros(vh, dk, dv)
        out = x.new_empty(n, vh, dv)
        for t in range(n):
            for h in range(vh):
                g = h // (vh // kh)
                held = decay[t, h] * state[h]
                wrote = beta[t, h] * (v[t, h] - held.T @ k[t, g])
                state[h] = held + torch.outer(k[t, g], wrote)
                out[t, h] = state[h].T @ (q[t, g] * dk**-0.5)
        out = out / (out.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()
        out = out * self.w[name + "norm.weight"] * F.silu(z.view(n, vh, dv))
        return out.flatten(1) @ self.w[name + "out_proj.weight"].T, state, padded[-(width - 1) :]

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = (x @ self.w[f"{name}{p}_proj.weight"].T for p in ("gate", "up"))
        return (F.silu(gate) * up) @ self.w[name + "down_proj.weight"].T

    def trunk(self, tokens: list[int]) -> Trace:
        x = self.embedding[torch.tensor(tokens)]
        positions = torch.arange(len(tokens))
        recurrent, conv, keys, values = [], [], [], []
        for i, kind in enumerate(self.c["layer_types"]):
            name = f"model.layers.{i}."
            inner = self.norm(x, name + "input_layernorm.weight")
            if kind == "linear_attention":
                mixed, state, history = self.delta_net(inner, name + "linear_attn.")
                recurrent.append(state)
                conv.append(history)
            else:
                mixed, k, v = self.attention(inner, name + "self_attn.", positions)
                keys.append(k.transpose(0, 1))
                values.append(v.transpose(0, 1))
            x = x + mixed
            x = x + self.mlp(self.norm(x, name + "post_attention_layernorm.weight"), name + "mlp.")
        hidden = self.norm(x, "model.norm.weight")
        return Trace(x, hidden, hidden @ self.head.T, recurrent, conv, keys, values)

    def draft_head(self, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The MTP head over positions 1 .. n - 1: token p with row p - 1 of `hidden`.

        Returns its normed rows and its keys and values, [kv_heads, n - 1, d].
        """
        embedded = self.embedding[torch.tensor(tokens[1:])]
        both = torch.cat(
            (
                self.norm(embedded, "mtp.pre_fc_norm_embedding.weight"),
                self.norm(hidden[: len(tokens) - 1], "mtp.pre_fc_norm_hidden.weight"),
            ),
            dim=-1,
        )
        x = both @ self.w["mtp.fc.weight"].T
        name = "mtp.layers.0."
        inner = self.norm(x, name + "input_layernorm.weight")
        mixed, k, v = self.attention(inner, name + "self_attn.", torch.arange(1, len(tokens)))
        x = x + mixed
        x = x + self.mlp(self.norm(x, name + "post_attention_layernorm.weight"), name + "mlp.")
        return self.norm(x, "mtp.norm.weight"), k.transpose(0, 1), v.transpose(0, 1)

    def draft(
        self, tokens: list[int], hidden: Tensor, passes: int
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Logits of each depth below the last token; the head's normed output feeds the next."""
        tokens, rows, logits = list(tokens), hidden, []
        for _ in range(passes):
            out, k, v = self.draft_head(tokens, rows)
            logits.append(out[-1] @ self.head.T)
            tokens.append(int(logits[-1].argmax()))
            rows = torch.cat((rows, out[-1:]))
        return logits, k, v
