"""Muon for the matrices (batched by shape), Adam for the rest; states are plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def orthogonal(g: Tensor) -> Tensor:
    """Five Newton-Schulz steps on a batch of matrices, in bfloat16."""
    x = g.bfloat16()
    flip = x.shape[-2] > x.shape[-1]
    x = x.mT if flip else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if flip else x).float()


class Optimizer:
    """Updates every parameter that has a gradient."""

    def __init__(
        self, params: dict[str, Tensor], muon_lr: float, adam_lr: float, decay: float
    ) -> None:
        self.params, self.muon_lr, self.adam_lr, self.decay = params, muon_lr, adam_lr, decay
        self.matrices: dict[tuple[int, ...], list[str]] = {}
        self.others: list[str] = []
        for name, p in params.items():
            if p.ndim == 2 and min(p.shape) > 8 and "embed" not in name:
                self.matrices.setdefault(tuple(p.shape), []).append(name)
            else:
                self.others.append(name)
        self.state = {n: torch.zeros_like(p) for n, p in params.items()}
        self.second = {n: torch.zeros_like(params[n]) for n in self.others}
        self.count = 0

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at ``scale`` times the base rates; gradients are dropped afterwards."""
        self.count += 1
        for shape, names in self.matrices.items():
            live = [n for n in names if self.params[n].grad is not None]
            if not live:
                continue
            grads, moments = [self.params[n].grad for n in live], [self.state[n] for n in live]
            momentum = 0.85 + 0.1 * min(self.count / 300, 1)
            torch._foreach_lerp_(moments, grads, 1 - momentum)
            ahead = torch._foreach_lerp(grads, moments, momentum)
            update = orthogonal(torch.stack(ahead)) * max(1.0, shape[0] / shape[1]) ** 0.5
            weights = [self.params[n] for n in live]
            torch._foreach_mul_(weights, 1 - self.muon_lr * scale * self.decay)
            torch._foreach_add_(weights, list(update.unbind(0)), alpha=-self.muon_lr * scale)
        live = [n for n in self.others if self.params[n].grad is not None]
        grads = [self.params[n].grad.float() for n in live]
        first, second = [self.state[n] for n in live], [self.second[n] for n in live]
        torch._foreach_lerp_(first, grads, 0.1)
        torch._foreach_mul_(second, 0.95)
        torch._foreach_addcmul_(second, grads, grads, 0.05)
        root = torch._foreach_sqrt(torch._foreach_div(second, 1 - 0.95**self.count))
        torch._foreach_add_(root, 1e-10)
        step = torch._foreach_div(torch._foreach_div(first, 1 - 0.9**self.count), root)
        torch._foreach_add_([self.params[n] for n in live], step, alpha=-self.adam_lr * scale)
        for p in self.params.values():
            p.grad = None

    def state_dict(self) -> dict:
        """Everything a resumed run needs."""
        return {"state": self.state, "second": self.second, "count": self.count}

    def load_state_dict(self, saved: dict) -> None:
        """The inverse of state_dict."""
        self.count = saved["count"]
        for mine, theirs in ((self.state, saved["state"]), (self.second, saved["second"])):
            for name, value in theirs.items():
                mine[name].copy_(value)
