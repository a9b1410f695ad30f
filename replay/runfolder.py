"""A run folder on disk: run.json, requests.jsonl, summary.json. Safe against a kill at any time.

Whole files are replaced atomically. Rows are appended with one write and one fsync each; a torn
last line is what a kill leaves at worst, and opening the folder again cuts it off.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from lumotree.errors import CorpusError
from replay.rows import Row

SCHEMA_VERSION = 1
# A resumed run continues one experiment: these parts of run.json must not differ.
SAME = ("options", "corpus", "model")


class RunFolder:
    """One run folder. `create` or `resume` for writing, `open` for reading."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.path = path
        self.run = run
        self._rows: BinaryIO | None = None

    @classmethod
    def create(cls, path: Path, run: dict[str, Any]) -> RunFolder:
        """A new folder. Raises CorpusError when the place holds something already."""
        try:
            if path.exists() and not (path.is_dir() and _is_free(path)):
                raise CorpusError(f"{path} exists and is not empty", "continue it with --resume")
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CorpusError(f"{path} cannot be created: {error.strerror}") from None
        folder = cls(path, {"schema_version": SCHEMA_VERSION, **run})
        folder.write_run()
        folder._open_rows()
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing folder, to read. Raises CorpusError."""
        try:
            run = json.loads((path / "run.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise CorpusError(f"{path} is not a run folder: it has no run.json") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CorpusError(f"{path / 'run.json'} cannot be read: {error}") from None
        _check_schema(path / "run.json", run, SCHEMA_VERSION)
        return cls(path, run)

    def resume(self, run: dict[str, Any]) -> None:
        """Open for appending. Raises CorpusError naming what differs from `run`.

        `arms` in it is the status by arm: what an arm decodes with must not differ, but an arm
        that was unavailable may be available now, and the other way round.
        """
        for part in SAME:
            if part in run and self.run.get(part) != run[part]:
                what = difference(part, self.run.get(part), run[part])
                raise CorpusError(f"{self.path} cannot be resumed: {what}", "start a new run")
        saved = self.run.get("arms") or {}
        for name, status in (run.get("arms") or {}).items():
            before = (saved.get(name) or {}).get("description")
            now = status.get("description")
            if before is None or now is None:
                continue
            before, now = shared_options(before, now)
            if before != now:
                what = difference(f"arm {name}", before, now)
                raise CorpusError(f"{self.path} cannot be resumed: {what}", "start a new run")
        self._open_rows()

    def rows(self) -> list[Row]:
        """All whole rows, a torn last line left out. Raises CorpusError naming file and line."""
        path = self.path / "requests.jsonl"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CorpusError(f"{path} cannot be read: {error.strerror}") from None
        rows = []
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            try:
                rows.append(Row.model_validate_json(line))
            except ValidationError as error:
                reason = error.errors(include_url=False)[0]["msg"]
                raise CorpusError(f"{path} line {number} is not a row: {reason}") from None
        return rows

    def append(self, row: Row) -> None:
        """Add one row; it is on disk when this returns. Raises CorpusError, as on a full disk."""
        data = row.model_dump_json().encode() + b"\n"
        try:
            while data:  # one call in practice; the system may write less near a full disk
                data = data[self._rows.write(data) :]
            os.fsync(self._rows.fileno())
        except OSError as error:
            path = self.path / "requests.jsonl"
            raise CorpusError(f"{path} cannot be written: {error.strerror}") from None

    def write_run(self) -> None:
        """Replace run.json by the current `run`."""
        self.write_json("run.json", self.run)

    def write_json(self, name: str, value: Any) -> None:
        """Replace one file as a whole; a kill leaves the old or the new one.

        Raises CorpusError naming the file, as on a full disk.
        """
        target, draft = self.path / name, self.path / f".{name}.part"
        data = json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, target)
        except OSError as error:
            raise CorpusError(f"{target} cannot be written: {error.strerror}") from None

    def summary(self) -> dict[str, Any]:
        """The saved summary. Raises CorpusError when the run has none yet or it cannot be read."""
        from replay.summary import SCHEMA_VERSION as NEWEST

        path = self.path / "summary.json"
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            hint = f"finish the run: lumotree replay --resume {self.path}"
            raise CorpusError(f"{self.path} has no summary.json", hint) from None
        except (OSError, ValueError, RecursionError) as error:
            raise CorpusError(f"{path} cannot be read: {error}") from None
        _check_schema(path, found, NEWEST, oldest=1)
        return found

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    def _open_rows(self) -> None:
        path = self.path / "requests.jsonl"
        # Unbuffered: a row is one write call, so a kill cannot leave half a row behind a whole one.
        try:
            self._rows = path.open("ab", buffering=0)
            _lock(self._rows, path)
            data = path.read_bytes()
            self._rows.truncate(data.rfind(b"\n") + 1)
        except OSError as error:
            raise CorpusError(f"{path} cannot be written: {error.strerror}") from None


def shared_options(saved: dict[str, Any], given: dict[str, Any]) -> tuple[dict, dict]:
    """Two descriptions of an arm without the options of this decoder that one does not know.

    An option that an older version had not is at its default: given, it is in the arm's name.
    """
    if not saved.get("kind") == given.get("kind") == "in-process":
        return saved, given
    both = saved.keys() & given.keys() | {"choice"}
    return tuple({k: v for k, v in one.items() if k in both} for one in (saved, given))


def difference(part: str, saved: Any, given: Any) -> str:
    """One sentence on how two settings differ, down to the first differing key."""
    if isinstance(saved, dict) and isinstance(given, dict):
        for key in [*saved, *(key for key in given if key not in saved)]:
            if saved.get(key) != given.get(key):
                return difference(f"{part} {key}", saved.get(key), given.get(key))
    return f"{part} was {_short(saved)}, now it is {_short(given)}"


def _check_schema(path: Path, value: Any, newest: int, oldest: int | None = None) -> None:
    """Raises CorpusError when a saved document is none or of a version not read here.

    `oldest` is the version of documents that do not say it.
    """
    if not isinstance(value, dict):
        raise CorpusError(f"{path} is not a JSON object")
    version = value.get("schema_version", oldest)
    if type(version) is not int or not 1 <= version <= newest:
        raise CorpusError(
            f"{path} has schema version {version!r}; this version reads up to {newest}",
            "use the version of lumotree that wrote it, or a later one",
        )


def _is_free(path: Path) -> bool:
    # A kill in the first instant leaves a draft of run.json and nothing else.
    return all(entry.name == ".run.json.part" for entry in path.iterdir())


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _lock(file: BinaryIO, path: Path) -> None:
    """Two processes must not append to one folder; the lock goes with the process."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CorpusError(f"{path.parent} is being written by another process") from None
