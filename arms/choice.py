"""A tree chosen by calibration: what `lumotree:tree=auto` decodes with."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lumotree.errors import ArmError, LumoTreeError
from lumotree.tree import tree_from_name

HINT = "make one with: lumotree breakeven CORPUS --out FILE"


@dataclass(frozen=True)
class TreeChoice:
    """The design a calibration predicted to be fastest, and what it predicted.

    weights_sha256 and device say for which model and machine kind; another needs its own.
    cpu and cores are the machine it was timed on, calibrated_on the requests of the corpus
    corpus_sha256 it was measured on; files of earlier versions do not say.
    """

    tree: str
    passes: int
    suffix: bool
    predicted_tok_s: float
    predicted_tokens_per_step: float
    predicted_ms_per_step: float
    weights_sha256: str
    device: str
    cpu: str | None = None
    cores: int | None = None
    corpus_sha256: str | None = None
    calibrated_on: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON form; what is not known is left out."""
        values = asdict(self) | {"calibrated_on": list(self.calibrated_on)}
        return {key: value for key, value in values.items() if value not in (None, [])}

    @classmethod
    def of(cls, value: Any, where: str) -> TreeChoice:
        """From JSON. Raises ArmError naming `where` when it is no choice."""
        try:
            known = {
                name: value[name] if field.default is MISSING else value.get(name, field.default)
                for name, field in cls.__dataclass_fields__.items()
            }
            if not isinstance(known["calibrated_on"], list | tuple):
                raise TypeError
            known["calibrated_on"] = tuple(map(str, known["calibrated_on"]))
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
        if not isinstance(value, Mapping):
            raise ArmError(f"{path} holds no tree choice", HINT)
        choice = cls.of(value.get("choice"), str(path))
        # The document around a choice says the same of itself.
        machine, corpus = value.get("machine"), value.get("corpus")
        if choice.cpu is None and isinstance(machine, Mapping):
            choice = replace(choice, cpu=machine.get("cpu"), cores=machine.get("cores"))
        if choice.corpus_sha256 is None and isinstance(corpus, Mapping):
            choice = replace(choice, corpus_sha256=corpus.get("sha256"))
        return choice

    def check(self, description: Mapping[str, Any]) -> None:
        """Raises ArmError when it was made for another model or device."""
        for key, what in (("weights_sha256", "other weights"), ("device", "another device")):
            if description.get(key) != getattr(self, key):
                raise ArmError(f"the tree was chosen for {what}", HINT)

    def notices(
        self, machine: Mapping[str, Any], corpus_sha256: str, scored: Collection[str]
    ) -> list[str]:
        """What to know of a rate measured with it: on another machine, or on its own requests.

        machine has `cpu` and `cores`; `scored` are the ids of the requests that are replayed.
        """
        found = []
        here = (machine.get("cpu"), machine.get("cores"))
        if self.cpu is not None and (self.cpu, self.cores) != here:
            found.append(
                f"tree=auto was chosen on another machine ({self.cpu}, {self.cores} cores; this "
                f"one is {here[0]}, {here[1]} cores), so it need not be the fastest tree here"
            )
        if not self.calibrated_on:
            found.append("it is not known on which requests tree=auto was chosen")
        elif self.corpus_sha256 in (None, corpus_sha256):
            seen = len(set(self.calibrated_on) & set(scored))
            if seen:
                found.append(
                    f"tree=auto was chosen on {seen} of these {len(scored)} requests, "
                    "which flatters it"
                )
        return found
