"""GDN tree verifiers, one file each, behind one contract (`base.Verifier`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lumotree.errors import LumoTreeError

if TYPE_CHECKING:
    from lumotree.verifiers.base import Verifier

# Name -> module and class; modules load when asked for.
_WHERE = {
    "path-scan": ("path_scan", "PathScan"),
    "native-path": ("native_path", "NativePath"),
    "torch-node": ("torch_node", "TorchNode"),
    "tree-wy": ("tree_wy", "TreeWY"),
    "weaver": ("weaver", "Weaver"),
    "weaver-fp32": ("weaver", "WeaverFp32"),
    "specla": ("specla", "SpecLA"),
    "bole": ("bole", "Bole"),
}
NAMES = tuple(_WHERE)


def verifier_class(name: str) -> type[Verifier]:
    """Raises LumoTreeError naming the verifiers there are."""
    if name not in _WHERE:
        raise LumoTreeError(f"unknown verifier {name!r}", f"one of {', '.join(NAMES)}")
    module, attribute = _WHERE[name]
    return getattr(import_module(f"lumotree.verifiers.{module}"), attribute)
