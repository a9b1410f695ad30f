"""From a file of any known format to corpus lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lumotree.errors import CorpusError
from replay.corpus import CHAT_URL, BadJson, load_json, parse_line
from replay.formats import aiperf, batch, body, har, mooncake, sharegpt, trajectory
from replay.formats.secrets import without_secrets
from replay.formats.source import Source
from replay.formats.threads import name_conversations

# The first that matches a record reads it; a bare body is what has messages and nothing else.
READERS = (batch, aiperf, har, trajectory, sharegpt, mooncake, body)
NAMES = tuple(reader.NAME for reader in READERS)


@dataclass(frozen=True)
class Imported:
    """Corpus lines, and the format they came from."""

    format: str
    lines: list[dict[str, Any]]


def read_foreign(path: Path, name: str | None = None) -> Imported:
    """Read `path`, in the named format or the one its first record has.

    Raises CorpusError naming file and line of what cannot be read, and the reason for traces
    without text.
    """
    reader = None
    lines: list[dict[str, Any]] = []
    seen: dict[str, Source] = {}
    if name is not None:
        reader = next((r for r in READERS if name == r.NAME), None)
        if reader is None:
            raise CorpusError(f"unknown format '{name}'", f"valid formats: {', '.join(NAMES)}")
    for record, source in records(path):
        if not isinstance(record, dict):
            raise source.error("a record must be an object")
        reader = reader or detect(record, source)
        if name is None and not reader.matches(record):
            raise source.error(f"not of the format of the first record ({reader.TEXT})")
        try:
            found = list(reader.read(record, source))
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
            raise source.error(f"not of the format '{reader.NAME}' ({reader.TEXT})") from None
        for line in found:
            number = len(lines) + 1
            line = complete(line, f"{source.stem}-{number:05}")
            if line["custom_id"] in seen:
                raise source.error(
                    f"custom_id '{line['custom_id']}' was there already: {seen[line['custom_id']]}"
                )
            seen[line["custom_id"]] = source
            check(line, source)
            lines.append(line)
    if reader is None or not lines:
        raise CorpusError(f"{path} holds no request")
    name_conversations(lines)
    return Imported(reader.NAME, lines)


def complete(line: dict[str, Any], custom_id: str) -> dict[str, Any]:
    """A whole corpus line, its keys in the usual order, without secrets."""
    return {
        "custom_id": line.get("custom_id") or custom_id,
        "method": "POST",
        "url": CHAT_URL,
        "body": without_secrets(line["body"]),
        "lumotree": without_secrets(line.get("lumotree") or {}),
    }


def check(line: dict[str, Any], source: Source) -> None:
    """The corpus's own rules, told with the place in the foreign file."""
    try:
        parse_line(dump(line), 0, source.path)
    except CorpusError as error:
        raise source.error(error.message.partition(" line 0: ")[2] or error.message) from None


def dump(value: Any) -> bytes:
    """One JSON value as the bytes of a line; text stays readable where it can be encoded."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half a surrogate pair, as truncated tool output may hold
        return json.dumps(value, separators=(",", ":")).encode()


def detect(record: dict[str, Any], source: Source) -> ModuleType:
    """The reader of a record. Raises CorpusError listing the formats."""
    for reader in READERS:
        if reader.matches(record):
            return reader
    raise source.error(
        f"no known format has the keys {', '.join(map(str, list(record)[:6]))}",
        f"known formats: {', '.join(NAMES)}; name one with --format",
    )


def records(path: Path) -> Iterator[tuple[Any, Source]]:
    """The records of a file: lines of JSONL, items of one list, or one document.

    Raises CorpusError naming the line of broken JSON.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise CorpusError(f"{path} does not exist") from None
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise CorpusError(f"{path} line {line}: not UTF-8 text") from None
    if not text.strip():
        raise CorpusError(f"{path} is empty")
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if _is_lines([line for _, line in lines[:2]]):
        for number, line in lines:
            yield _parse(line, Source(path, number)), Source(path, number)
        return
    whole = _parse(text, Source(path))
    if isinstance(whole, list):
        for index, item in enumerate(whole, start=1):
            yield item, Source(path, item=f"item {index}")
    else:
        yield whole, Source(path)


def _is_lines(first: list[str]) -> bool:
    """True for JSONL, told by its first two lines; one of them may be broken."""
    if len(first) == 1:
        return first[0].lstrip().startswith("{") and first[0].rstrip().endswith("}")
    return any(_is_object(line) for line in first)


def _is_object(line: str) -> bool:
    try:
        return isinstance(load_json(line), dict)
    except BadJson:
        return False


def _parse(text: str, source: Source) -> Any:
    try:
        return load_json(text)
    except BadJson as error:
        raise Source(source.path, source.line or error.line).error(error.reason) from None
