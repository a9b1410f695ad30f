"""A tree chosen by calibration: what `lumotree:tree=auto` decodes with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lumotree.errors import ArmError, LumoTreeError
from lumotree.tree import tree_from_name

HINT = "make one with: lumotree breakeven CORPUS --out FILE"


@dataclass(frozen=True)
class TreeChoice:
    """The design a calibration predicted to be fastest, and what it predicted.

    weights_sha256 and device say for which model and machine kind; another needs its own.
    """

    tree: str
    passes: int
    suffix: bool
    predicted_tok_s: float
    predicted_tokens_per_step: float
    predicted_ms_per_step: float
    weights_sha256: str
    device: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, value: Any, where: str) -> TreeChoice:
        """From JSON. Raises ArmError naming `where` when it is no choice."""
        try:
            known = {name: value[name] for name in cls.__dataclass_fields__}
            tree_from_name(known["tree"])
            if not isinstance(known["passes"], int) or not isinstance(known["suffix"], bool):
                raise TypeError
            return cls(**known)
        except (KeyError, TypeError, AttributeError, LumoTreeError):
            raise ArmError(f"{where} holds no tree choice", HINT) from None

    @classmethod
    def load(cls, path: Path) -> TreeChoice:
        """The `choice` of a file that `lumotree breakeven` wrote. Raises ArmError."""
        try:
            value = json.loads(path.read_bytes())
        except OSError as error:
            raise ArmError(f"{path} cannot be read: {error.strerror}", HINT) from None
        except ValueError:
            raise ArmError(f"{path} is not JSON", HINT) from None
        return cls.of(value.get("choice") if isinstance(value, Mapping) else None, str(path))

    def check(self, description: Mapping[str, Any]) -> None:
        """Raises ArmError when it was made for another model or device."""
        for key in ("weights_sha256", "device"):
            if description.get(key) != getattr(self, key):
                raise ArmError(f"the tree was chosen for another {key.split('_')[0]}", HINT)
