"""Batched decoding: many sequences of equal prompt length, one token each per step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from model import Net
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """L2-normalised rows, eps inside the sum."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


class Decoder:
    """Holds the states of a batch; ``net`` is not compiled."""

    def __init__(
        self, net: Net, ids: Tensor, room: int, dtype: torch.dtype, at_once: int = 32
    ) -> None:
        self.net, self.dtype, self.length = net, dtype, ids.shape[1]
        batch, s = ids.shape[0], net.s
        self.states: list[tuple[Tensor, Tensor]] = []
        hidden = []
        for start in range(0, batch, at_once):
            x, states = net.layers(ids[start : start + at_once], dtype, keep=True)
            hidden.append(x[:, -1:].clone())
            if not self.states:
                for i in range(s.layers):
                    if s.full(i):
                        one = torch.zeros(
                            batch, self.length + room, s.head_dim, dtype=dtype, device=ids.device
                        )
                        self.states.append((one, torch.zeros_like(one)))
                    else:
                        a, b = states[i]
                        self.states.append(
                            (
                                a.new_zeros(batch, *a.shape[1:]),
                                b.new_zeros(batch, *b.shape[1:]).float(),
                            )
                        )
            for i, (a, b) in enumerate(states):
                there = slice(start, start + a.shape[0])
                if s.full(i):
                    self.states[i][0][there, : self.length] = a[:, 0]
                    self.states[i][1][there, : self.length] = b[:, 0]
                else:
                    self.states[i][0][there] = a
                    self.states[i][1][there] = b
        self.logits = self.head(torch.cat(hidden))

    def head(self, x: Tensor) -> Tensor:
        """Logits of one position per row."""
        h = self.net.norm(x[:, 0], self.net.p["model.norm.weight"])
        return F.linear(h, self.net.p["model.embed_tokens.weight"].to(h.dtype)).float()

    def step(self, tokens: Tensor) -> None:
        """Feed one token per row; the next logits are in ``self.logits``."""
        net, t = self.net, self.length
        x = net.embed(tokens[:, None], self.dtype)
        cos, sin = net.rope(torch.tensor([t], device=tokens.device))
        for i in range(net.s.layers):
            at = f"model.layers.{i}"
            if net.s.full(i):
                keys, values = self.states[i]
                q, k, v, gate = net.attn_in(x, *net.attn_weights(at), cos, sin)
                keys[:, t], values[:, t] = k[:, 0, 0], v[:, 0, 0]
                q = q[:, :, 0] * net.s.head_dim**-0.5
                p = torch.bmm(q, keys[:, : t + 1].transpose(1, 2)).float().softmax(-1).to(q.dtype)
                x = net.attn_close(at, x, torch.bmm(p, values[:, : t + 1])[:, :, None], gate)
            else:
                before, state = self.states[i]
                q, k, v, g, beta, z, last = net.gdn_in(x, *net.gdn_weights(at), before)
                before.copy_(last)
                q, k, v = (y[:, 0].float().flatten(0, 1) for y in (q, k, v))
                q, k, flat = unit(q) * q.shape[-1] ** -0.5, unit(k), state.flatten(0, 1)
                flat.mul_(g[:, 0].exp().flatten()[:, None, None])
                delta = (v - torch.bmm(k[:, None], flat)[:, 0]) * beta[:, 0].float().flatten()[
                    :, None
                ]
                flat.baddbmm_(k[:, :, None], delta[:, None])
                o = torch.bmm(q[:, None], flat)[:, 0].view(len(tokens), 1, net.s.gdn_heads, -1)
                x = net.gdn_close(at, x, o.to(self.dtype), z)
        self.length += 1
        self.logits = self.head(x)


@torch.no_grad()
def continue_rows(
    net: Net, ids: Tensor, new: int, temperature: Tensor, dtype: torch.dtype, at_once: int = 32
) -> Tensor:
    """ids [B, P] followed by ``new`` tokens sampled at per-row temperatures (0 is greedy)."""
    decoder = Decoder(net, ids, new, dtype, at_once)
    out = torch.empty(ids.shape[0], new, dtype=ids.dtype, device=ids.device)
    for i in range(new):
        noise = -torch.empty_like(decoder.logits).exponential_().log()
        out[:, i] = (decoder.logits + temperature[:, None] * noise).argmax(-1)
        if i + 1 < new:
            decoder.step(out[:, i])
    return torch.cat((ids, out), 1)
