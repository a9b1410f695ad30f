"""Guards: what must hold of an arm's output before its speed may be a headline."""

from replay.guards.check import Check, Evidence
from replay.guards.equality import Equality, Mismatch, check_equality, divergence
from replay.guards.judge import guard_arm, judge

__all__ = [
    "Check",
    "Equality",
    "Evidence",
    "Mismatch",
    "check_equality",
    "divergence",
    "guard_arm",
    "judge",
]
