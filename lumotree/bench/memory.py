"""Memory accounting of arXiv 2609.23900 as formulas: what its figures are made of.

The figures of this project's rows are the buffers it allocates (`Verifier.buffers_mib`); these
formulas put the paper's allocation policies beside them at any geometry.
"""

from __future__ import annotations

from lumotree.ops.gdn import Geometry

MIB = 2**20
ROWS = 32
# Request slots beside the rows in a store-every-node server.
EXTRA_SLOTS = 3
BF16 = 2


def operand_bytes(geometry: Geometry) -> int:
    """bf16 key, value, raw decay and rate of one row and layer."""
    g = geometry
    return BF16 * (g.key_heads * g.dk + g.heads * g.dv + 2 * g.heads)


def cut_state_mib(geometry: Geometry) -> dict[str, float]:
    """The path scan with cut-state handoff: a cut buffer of one state a row, reused by layers;
    operand rings of every row and layer; publication staging of half as many rows."""
    ring = ROWS * geometry.layers * operand_bytes(geometry)
    parts = {
        "cut buffer": ROWS * geometry.state_bytes,
        "operand rings": ring,
        "publication staging": ring // 2,
    }
    return {name: size / MIB for name, size in parts.items()}


def store_every_node_mib(geometry: Geometry) -> float:
    """One state slot for each row and request slot, in every layer."""
    return (ROWS + EXTRA_SLOTS) * geometry.layers * geometry.state_bytes / MIB
