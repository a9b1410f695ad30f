"""The one exception family that users see: a sentence, and what to do about it."""

from __future__ import annotations


class LumoTreeError(Exception):
    """A fault the user can mend. `hint` is the next thing to try; `exit_code` is the CLI's.

    Code that raises it names the file, line, field or option in `message`.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} ({self.hint})"


class CheckpointError(LumoTreeError):
    """A checkpoint that cannot be loaded: missing file, unsupported field, wrong shape."""


class RequestError(LumoTreeError):
    """A request the decoder cannot run: empty prompt, too long, option out of range."""


class CorpusError(LumoTreeError):
    """A corpus, manifest or run folder that cannot be read; names the file and line."""


class ArmError(LumoTreeError):
    """An arm spec that means nothing, or an arm that cannot be started."""
