"""`corpus select`: some requests of a corpus, their lines byte for byte, frozen by a manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from lumotree.errors import CorpusError
from replay.corpus import Corpus, CorpusRequest
from replay.formats.writing import freeze
from replay.selection import evenly_spaced, select

Chosen = tuple[CorpusRequest, ...]


def _first(requests: Sequence[CorpusRequest], n: int) -> Chosen:
    return tuple(requests[:n])


def _even(requests: Sequence[CorpusRequest], n: int) -> Chosen:
    return tuple(requests[index] for index in evenly_spaced(len(requests), n))


# rule: (what its manifest says, the rule)
RULES: dict[str, tuple[str, Callable[[Sequence[CorpusRequest], int], Chosen]]] = {
    "proportional": (
        "shared out to conversations in proportion by largest remainder, evenly spaced in capture "
        "order",
        select,
    ),
    "even": ("evenly spaced in capture order", _even),
    "first": ("the first in capture order", _first),
}


def select_corpus(
    corpus: Corpus, rule: str, n: int, out: Path, force: bool = False
) -> tuple[Chosen, str]:
    """Write the chosen lines of a corpus and a manifest. Returns them and the new file's SHA-256.

    Raises CorpusError.
    """
    if rule not in RULES:
        raise CorpusError(f"unknown rule '{rule}'", f"valid rules: {', '.join(RULES)}")
    if not 1 <= n <= len(corpus.requests):
        raise CorpusError(f"--n is {n}; {corpus.path} holds {len(corpus.requests)} requests")
    said, choose = RULES[rule]
    chosen = choose(corpus.requests, n)
    # The file's own lines: a request's bytes are the same in every selection.
    lines = corpus.path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    data = b"".join(lines[request.line - 1].rstrip(b"\r") + b"\n" for request in chosen)
    captured = Counter(request.conversation for request in corpus.requests)
    kept = Counter(request.conversation for request in chosen)
    about = {
        "captured": len(corpus.requests),
        "selection": said,
        "selected_from_sha256": corpus.sha256,
        "conversations": {
            str(name): {"captured": count, "kept": kept[name]} for name, count in captured.items()
        },
    }
    return chosen, freeze(data, len(chosen), out, about, force)
