"""The request axis of the kernels of a step: one launch serves R requests of one tree.

States have a leading dimension of N seats; `seats` int32 [R] says which seat each request has.
Below 0 a request is nobody's: its programs write nothing. Where `seats` is None, states have no
such dimension, there is one request, and a kernel compiles to what it would be without the axis.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part(base_ptr, index, rows, WIDTH: tl.constexpr = 1):
    """Start of part `index` of a tensor, parts `rows` rows of WIDTH apart; 64 bits, for they may
    lie past 2^31 elements. WIDTH tells the compiler how the start is aligned."""
    return base_ptr + index.to(tl.int64) * rows * WIDTH
