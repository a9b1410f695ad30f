"""From corpus requests to what is sent: token ids and parameters, equal for all arms."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from arms.protocol import ArmRequest
from lumotree.errors import CorpusError, RequestError
from lumotree.request import SamplingParams
from replay.corpus import Corpus, CorpusRequest
from replay.runner import Item
from replay.selection import evenly_spaced, select

if TYPE_CHECKING:
    from lumotree.engine import Engine
    from replay.job import ReplayOptions


def make_items(corpus: Corpus, options: ReplayOptions, engine: Engine) -> list[Item]:
    """Tokenise the selected requests and settle their parameters.

    The cap shrinks to what the context leaves, equally for all arms. Raises CorpusError naming
    the line of a prompt that does not fit or cannot be tokenised, or of a recorded sampling value
    out of range.
    """
    chosen = select(corpus.requests, options.limit)
    return [make_item(corpus, request, options, engine) for request in chosen]


def make_item(
    corpus: Corpus, request: CorpusRequest, options: ReplayOptions, engine: Engine
) -> Item:
    """One request of `make_items`."""
    where = corpus.where(request)
    try:
        params: SamplingParams = options.rule().params(request.request_id, request.sampling)
    except RequestError as error:
        raise CorpusError(f"{where}: {error.message}", error.hint) from None
    ids = prompt_ids(corpus, request, engine)
    room = engine.max_context - len(ids)
    if room < 1:
        raise CorpusError(
            f"{where}: the prompt has {len(ids)} tokens, "
            f"the model's context holds {engine.max_context}",
            "--max-context serves positions past those that a model declares; what it makes there "
            "is beyond its training",
        )
    params = replace(params, max_tokens=min(params.max_tokens, room))
    return Item(
        ArmRequest(
            request.request_id, tuple(ids), request.conversation, request.messages, request.tools
        ),
        params,
    )


def prompt_ids(corpus: Corpus, request: CorpusRequest, engine: Engine) -> list[int]:
    """A recorded conversation as token ids. Raises CorpusError naming its line."""
    where = corpus.where(request)
    try:
        return engine.tokenizer.encode_chat(request.messages, request.tools)
    except RequestError as error:
        raise CorpusError(f"{where}: {error.message}", error.hint) from None
    except (TypeError, UnicodeError):
        # Half a surrogate pair is valid JSON and no text.
        raise CorpusError(
            f"{where}: the tokenizer cannot take this request",
            "look for half a surrogate pair, such as \\ud83d, in its text",
        ) from None


def held_out(corpus: Corpus, options: ReplayOptions, engine: Engine) -> list[Item]:
    """A few requests that the run leaves out, evenly spaced: a tree chosen on them is not
    flattered by the requests it is scored on. Other turns of their conversations may be scored.
    None where the run takes all, or where they do not fit the model.
    """
    from replay.calibration import REQUESTS

    taken = {request.request_id for request in select(corpus.requests, options.limit)}
    left = [request for request in corpus.requests if request.request_id not in taken]
    items = []
    for index in evenly_spaced(len(left), min(REQUESTS, len(left))):
        try:
            items.append(make_item(corpus, left[index], options, engine))
        except CorpusError:
            continue  # a fault of a request that nobody asked for
    return items
