"""Sets of variants: one optimisation taken away at a time, and ways to draft."""

from __future__ import annotations

from lumotree.errors import LumoTreeError

FULL = "lumotree"
NARROW = "draft_weights=fp8"
# The first arm of a set is what the others vary.
SETS: dict[str, tuple[str, ...]] = {
    "optimisations": (
        FULL,
        "lumotree:attention=stock",
        "lumotree:selection=separate",
        "lumotree:operands=inline",
    ),
    "drafting": (
        FULL,
        "lumotree:passes=3",
        "lumotree:passes=3/5",
        "lumotree:suffix=off",
        f"{FULL}:{NARROW}",
        f"{FULL}:passes=9,{NARROW}",
    ),
}
# Below this a reduced vocabulary proposes too little to be worth a row.
LEAST_VOCAB = 64


def variant_set(
    name: str, vocab_size: int | None = None, eight_bits: bool = True
) -> tuple[str, ...]:
    """Arm specs of a set; `drafting` also tries an eighth and half of the draft vocabulary.

    eight_bits: the device can draft with them. Raises LumoTreeError naming the sets there are.
    """
    if name not in SETS:
        raise LumoTreeError(f"unknown set {name!r}", f"one of {', '.join(SETS)}")
    specs = tuple(spec for spec in SETS[name] if eight_bits or NARROW not in spec)
    if name == "drafting" and vocab_size is not None:
        sizes = [size for size in (vocab_size // 8, vocab_size // 2) if size >= LEAST_VOCAB]
        specs += tuple(f"lumotree:draft_vocab={size}" for size in sizes)
    return specs
