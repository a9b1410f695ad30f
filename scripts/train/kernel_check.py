"""Compare the CUDA chunk kernel with the torch form, outputs and gradients, before any training."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def main() -> None:
    """Raise if any relative difference is above two per cent."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fast
    from gdn_backward import install
    from transformers.models.qwen3_5 import modeling_qwen3_5 as family

    install()
    slow = getattr(
        family.torch_chunk_gated_delta_rule, "__wrapped__", family.torch_chunk_gated_delta_rule
    )
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 512, 2, 128, device="cuda") for _ in range(3))
    g = -F.softplus(torch.randn(2, 512, 2, device="cuda") - 2)
    beta = torch.rand(2, 512, 2, device="cuda")
    grad = torch.randn(2, 512, 2, 128, device="cuda")
    results, off = [], []
    for rule, dtype in ((slow, torch.float32), (fast, torch.bfloat16)):
        leaves = [t.to(dtype).clone().requires_grad_() for t in (q, k, v)] + [
            t.clone().requires_grad_() for t in (g, beta)
        ]
        out, _ = rule(*leaves[:3], g=leaves[3], beta=leaves[4], use_qk_l2norm_in_kernel=True)
        out.backward(grad.to(out.dtype))
        results.append([out.float(), *(x.grad.float() for x in leaves)])
    for name, a, b in zip(("o", "q", "k", "v", "g", "beta"), *results, strict=True):
        error = ((a - b).norm() / a.norm()).item()
        print(f"{name}: relative difference {error:.4f}", flush=True)
        if error > 0.02:
            off.append(name)
    if off:
        raise SystemExit(f"the chunk kernel is off in {off}")


if __name__ == "__main__":
    main()
