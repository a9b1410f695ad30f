"""A fault: patches of named seams for the time of a `with`, and a count of what they changed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

AUDITS = ("component", "continuation", "sampler", "soak")


class Mutation:
    """How often a fault changed something; a patch adds to it only where the result differs.

    `inside` is true while a patched call runs, so that a seam which calls another patched seam
    is changed once.
    """

    def __init__(self) -> None:
        self.count = 0
        self.inside = False


Patches = Callable[[Mutation], Sequence[AbstractContextManager]]


@dataclass(frozen=True)
class Fault:
    """A defect that can be planted and taken out again.

    surface: what it breaks. audit: which audit must see it. text: one sentence.
    """

    name: str
    surface: str
    audit: str
    text: str
    patches: Patches

    @contextmanager
    def apply(self) -> Iterator[Mutation]:
        """The fault holds inside the `with`, in this process; nothing is left behind."""
        mutation = Mutation()
        with ExitStack() as stack:
            for patch in self.patches(mutation):
                stack.enter_context(patch)
            yield mutation


def captured_module(name: str) -> Any:
    """lumotree.captured.NAME where captured steps are in use, else None: it needs Triton."""
    return sys.modules.get(f"lumotree.captured.{name}")


def replaced_captured(
    owner: str | None, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> list[AbstractContextManager]:
    """`replaced` in the module of captured steps, or in its class `owner`; nothing without them."""
    module = captured_module("decoder")
    if module is None:
        return []
    return [replaced(module if owner is None else getattr(module, owner), name, make)]


@contextmanager
def replaced(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """`owner.name` is make(original) inside the `with`. Owners are modules and classes.

    Raises AttributeError when the owner itself has no such attribute: a seam that moved must not
    turn a fault into nothing.
    """
    if name not in vars(owner):
        raise AttributeError(f"{owner.__name__} has no {name} of its own")
    original = vars(owner)[name]
    setattr(owner, name, functools.wraps(original)(make(original)))
    try:
        yield
    finally:
        setattr(owner, name, original)
