"""The grammar of arm specs: NAME[:key=value[,key=value]], several separated by spaces."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from lumotree.errors import ArmError, LumoTreeError

MTP_DEPTHS = (1, 3, 5, 7)
ALL = ("ar", "mtp-5", "lumotree", "sglang-eagle")
MAX_PASSES = 16
MAX_ROUND_ROWS = 512
APIS = ("completions", "chat")
# tree=auto: the tree that a calibration on this machine and corpus predicted to be fastest.
AUTO = "auto"


@dataclass(frozen=True)
class ArmSpec:
    """One parsed spec; `options` holds what was given, in the order of OPTIONS when parsed."""

    name: str
    options: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        given = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{given}" if given else self.name

    def values(self) -> dict[str, Any]:
        """The options as their checks read them: passes is a number, suffix true or false."""
        return {
            key: OPTIONS[self.name][key](f"option '{key}' of arm '{self.name}'", value)
            for key, value in self.options.items()
        }


def parse_arms(texts: Iterable[str], beside: Sequence[str] = ()) -> list[ArmSpec]:
    """Specs of an --arms text or of several --arm texts, in order.

    Raises ArmError naming the arm or the option and the valid ones. `all` stands for
    `ar mtp-5 lumotree sglang-eagle`. A comma too ends an arm that has no options. `beside`: names
    that the caller knows besides, of arms without options.
    """
    specs: list[ArmSpec] = []
    for word in (word for text in texts for part in text.split() for word in _arms_of(part)):
        specs += [ArmSpec(name) for name in ALL] if word == "all" else [parse_arm(word, beside)]
    if not specs:
        raise ArmError("no arm is named", f"valid arms: {', '.join(['all', *OPTIONS, *beside])}")
    labels = [str(spec) for spec in specs]
    for label in labels:
        if labels.count(label) > 1:
            raise ArmError(f"arm '{label}' is named twice")
    return specs


def _arms_of(text: str) -> list[str]:
    """`ar,openai:url=X` are two; a comma after options separates options."""
    names, colon, options = text.partition(":")
    *bare, last = names.split(",")
    return [*bare, f"{last}{colon}{options}"]


def parse_arm(text: str, beside: Sequence[str] = ()) -> ArmSpec:
    """One spec. Raises ArmError as `parse_arms` does."""
    name, colon, rest = text.partition(":")
    known = OPTIONS | dict.fromkeys(beside, {})
    if name not in known:
        raise ArmError(f"unknown arm '{name}'", _suggest(name, ["all", *known], "arms"))
    if colon and not rest:
        raise ArmError(f"arm '{text}' ends in a colon without options")
    options: dict[str, str] = {}
    last = None
    for item in rest.split(",") if rest else []:
        key, equals, value = item.partition("=")
        if not equals and last == "tree":
            # A parent list such as tree=-1,0,0,1 has commas of its own.
            options[last] += f",{item}"
            continue
        if key not in known[name]:
            hint = _suggest(key, list(known[name]), f"options of {name}")
            raise ArmError(f"arm '{name}' has no option '{key}'", hint)
        if key in options:
            raise ArmError(f"arm '{name}' has option '{key}' twice")
        if not value:
            raise ArmError(f"option '{key}' of arm '{name}' has no value")
        options[key] = value
        last = key
    # One order, so that one arm has one name.
    spec = ArmSpec(name, {key: options[key] for key in known[name] if key in options})
    spec.values()
    if options.get("tree") == AUTO:
        for key in spec.options.keys() - {"tree", "plan"}:
            raise ArmError(f"arm '{text}': tree={AUTO} chooses {key} itself")
    elif "plan" in options:
        raise ArmError(f"arm '{text}': plan= belongs to tree={AUTO}")
    return spec


def _tree(where: str, value: str) -> str:
    from lumotree.tree import tree_from_name

    if value == AUTO:
        return value
    try:
        tree_from_name(value)
    except LumoTreeError as error:
        raise ArmError(f"{where}: {error.message}", error.hint) from None
    return value


def _whole(text: str, least: int, most: int) -> int | None:
    """A number within bounds, in its one spelling, so that one arm has one name; else None."""
    number = int(text) if re.fullmatch(r"0|[1-9][0-9]{0,8}", text) else None
    return number if number is not None and least <= number <= most else None


def _passes(where: str, value: str) -> int | tuple[int, int]:
    """A number of passes, or `first/all`: the rest run only where the first ones are sure."""
    first, slash, every = value.partition("/")
    start, stop = _whole(first, 0, MAX_PASSES), _whole(every, 0, MAX_PASSES)
    if not slash and start is not None:
        return start
    if start and stop is not None and start < stop:
        return start, stop
    raise ArmError(
        f"{where} is '{value}'; it takes a whole number from 0 to {MAX_PASSES}, or two such as 3/5"
    )


def _one_of(*valid: str) -> Callable[[str, str], str]:
    def check(where: str, value: str) -> str:
        if value not in valid:
            raise ArmError(f"{where} is '{value}'", _suggest(value, list(valid), "values"))
        return value

    return check


def _verifier(where: str, value: str) -> str:
    from lumotree.verifiers import NAMES

    return _one_of(*NAMES)(where, value)


def _count(where: str, value: str) -> int:
    if (count := _whole(value, 3, 10**9 - 1)) is None:
        raise ArmError(f"{where} is '{value}'; it takes a number of token ids, at least 3")
    return count


def _rows(where: str, value: str) -> int:
    if (rows := _whole(value, 0, MAX_ROUND_ROWS)) is None:
        raise ArmError(f"{where} is '{value}'; it takes a number of rows, at most {MAX_ROUND_ROWS}")
    return rows


def _switch(where: str, value: str) -> bool:
    if value not in ("on", "off"):
        raise ArmError(f"{where} is '{value}'; it takes on or off")
    return value == "on"


def _word(where: str, value: str) -> str:
    """Any name will do here; what it means is the arm's business."""
    return value


def _api(where: str, value: str) -> str:
    if value not in APIS:
        raise ArmError(f"{where} is '{value}'; it takes {' or '.join(APIS)}")
    return value


def _variable(where: str, value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", value):  # a key itself is not repeated
        raise ArmError(f"{where} is no name of an environment variable")
    return value


def _urls(where: str, value: str) -> list[str]:
    """One address, or several joined by +."""
    if "@" in value:  # and nothing of it is repeated, nor saved as the arm's name
        raise ArmError(f"{where} has an @; an address with a user or password is not taken")
    urls = re.split(r"\+(?=https?://)", value)
    for url in urls:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise ArmError(
                f"{where} is '{url}'; it takes an address such as http://127.0.0.1:30000"
            )
    return urls


def _suggest(word: str, valid: list[str], what: str) -> str:
    if not valid:
        return f"there are no {what}"
    close = difflib.get_close_matches(word, valid, n=1)
    meant = f"did you mean '{close[0]}'? " if close else ""
    return f"{meant}valid {what}: {', '.join(valid)}"


# Arms that run in this process: what each fixes of DecoderConfig. One that fixes nothing has its
# defaults and takes options.
IN_PROCESS: dict[str, dict[str, Any]] = {
    "ar": {"tree": "root", "passes": 0, "suffix": False},
    **{
        f"mtp-{depth}": {"tree": f"chain-{depth}", "passes": depth, "suffix": False}
        for depth in MTP_DEPTHS
    },
    "lumotree": {},
}
DECODER_OPTIONS = {
    "tree": _tree,
    "attention": _one_of("grouped", "stock"),
    "selection": _one_of("fused", "separate"),
    "operands": _one_of("prepared", "inline"),
    "passes": _passes,
    "draft_vocab": _count,
    "draft_weights": _one_of("model", "fp8"),
    "round_rows": _rows,
    "verify": _verifier,
    "suffix": _switch,
    "plan": _word,
}
# Names and options that exist, each option with what checks and reads it. Help and errors are
# made from this.
OPTIONS: dict[str, dict[str, Callable[[str, str], Any]]] = {
    **{name: {} if fixed else DECODER_OPTIONS for name, fixed in IN_PROCESS.items()},
    "sglang-eagle": {"url": _urls, "key": _variable},
    "vllm-mtp": {"url": _urls, "model": _word, "key": _variable},
    "openai": {"url": _urls, "model": _word, "key": _variable, "api": _api, "extras": _switch},
}
