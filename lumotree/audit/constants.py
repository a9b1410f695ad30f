"""Constants measured on calibration data, frozen in a file before held-out data are looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lumotree.errors import LumoTreeError

NAME = "constants.json"


class Constants:
    """What audits measured on their calibration data, by audit and seed; kept in `folder` if there
    is one.

    A value is written once. A later run in the same folder must find the same values, so nothing
    that was seen on held-out data can widen a limit.
    """

    def __init__(self, folder: Path | None = None, seed: int = 0) -> None:
        """Raises LumoTreeError for a file that cannot be read."""
        self.path = None if folder is None else folder / NAME
        self.seed = seed
        self.values: dict[str, Any] = {}
        if self.path is not None and self.path.exists():
            try:
                self.values = json.loads(self.path.read_text())
            except (OSError, ValueError) as error:
                raise LumoTreeError(f"{self.path} cannot be read: {error}") from None

    def freeze(self, audit: str, measured_on: list[str], values: dict[str, Any]) -> dict[str, Any]:
        """Writes the constants of an audit and returns them.

        Raises LumoTreeError when others are frozen already.
        """
        # What is compared is what a file holds: JSON turns tuples into lists.
        found = json.loads(json.dumps({"measured_on": measured_on, "values": values}))
        key = f"{audit}, seed {self.seed}"
        if self.values.setdefault(key, found) != found:
            raise LumoTreeError(
                f"{self.path or NAME} holds other constants of {key}",
                "they are frozen; audit into a new folder with --out",
            )
        if self.path is not None:
            self.path.write_text(json.dumps(self.values, indent=2) + "\n")
        return found["values"]
