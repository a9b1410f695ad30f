"""From a corpus to files other tools read. What only this project knows stays behind.

`lumotree` objects (conversation, recorded answer, token ids) are stripped from every format.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lumotree.errors import CorpusError
from replay.corpus import Corpus, manifest_path
from replay.formats.reading import dump
from replay.formats.secrets import without_secrets

Lines = Sequence[dict[str, Any]]


def corpus_lines(corpus: Corpus) -> list[dict[str, Any]]:
    """The lines of a corpus that was read and checked, as they stand in its file."""
    text = corpus.path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    return [json.loads(line) for line in text.split(b"\n") if line.strip()]


def to_batch(lines: Lines) -> bytes:
    """OpenAI batch lines: vLLM run-batch, OpenAI's own endpoint."""
    kept = ("custom_id", "method", "url", "body")
    return _jsonl({key: line[key] for key in kept if key in line} for line in lines)


def to_body(lines: Lines) -> bytes:
    """Bare bodies: AIPerf raw payloads, SGLang's `openai` dataset."""
    return _jsonl(line["body"] for line in lines)


def to_aiperf(lines: Lines) -> bytes:
    """AIPerf inputs.json: sessions in the order of their first request."""
    sessions: dict[str, list[Any]] = {}
    for line in lines:
        known = line.get("lumotree") or {}
        name = str(known.get("conversation") or line["custom_id"])
        sessions.setdefault(name, []).append(line["body"])
    data = [{"session_id": name, "payloads": bodies} for name, bodies in sessions.items()]
    return dump({"data": data}) + b"\n"


def to_mooncake(lines: Lines) -> bytes:
    """Mooncake lines with a payload; the conversation is the session."""
    return _jsonl(
        {"session_id": str(known["conversation"]), "payload": line["body"]}
        if (known := line.get("lumotree") or {}).get("conversation") is not None
        else {"payload": line["body"]}
        for line in lines
    )


WRITERS: dict[str, Callable[[Lines], bytes]] = {
    "batch": to_batch,
    "body": to_body,
    "aiperf": to_aiperf,
    "mooncake": to_mooncake,
}


def export_corpus(corpus: Corpus, name: str, out: Path, force: bool = False) -> None:
    """Write a corpus in another tool's format. Raises CorpusError."""
    if name not in WRITERS:
        raise CorpusError(f"unknown format '{name}'", f"valid formats: {', '.join(WRITERS)}")
    lines = [without_secrets(line) for line in corpus_lines(corpus)]
    place(out, WRITERS[name](lines), force)


def write_corpus(lines: Lines, out: Path, about: dict[str, Any], force: bool = False) -> str:
    """Write corpus lines and the manifest that freezes them; returns the SHA-256."""
    return freeze(_jsonl(lines), len(lines), out, about, force)


def freeze(data: bytes, count: int, out: Path, about: dict[str, Any], force: bool = False) -> str:
    """Write the bytes of a corpus and its manifest."""
    not_a_folder(out)
    manifest = manifest_path(out)
    if manifest.exists() and not force:
        raise CorpusError(f"{manifest} exists", "choose another --out, or add --force")
    sha256 = hashlib.sha256(data).hexdigest()
    frozen = {"schema_version": 1, "corpus": out.name, "count": count, "sha256": sha256, **about}
    place(out, data, force)
    place(manifest, json.dumps(frozen, indent=2, ensure_ascii=False).encode() + b"\n", force)
    return sha256


def not_a_folder(out: Path) -> None:
    """Raises CorpusError where a file is to be written and a folder is named."""
    if not out.name or out.is_dir():
        raise CorpusError(f"{out} is a folder", "--out takes the name of a file")


def place(out: Path, data: bytes, force: bool) -> None:
    """Write a whole file or none. Raises CorpusError, also when it is there already."""
    not_a_folder(out)
    if out.exists() and not force:
        raise CorpusError(f"{out} exists", "choose another --out, or add --force")
    draft = out.with_name(f".{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(data)
        os.replace(draft, out)
    except OSError as error:
        raise CorpusError(f"{out} cannot be written: {error.strerror}") from None


def _jsonl(values: Any) -> bytes:
    return b"".join(dump(value) + b"\n" for value in values)
