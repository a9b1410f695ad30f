"""Between the routes and the scheduler: prompts, admission, and answers whole or streamed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lumotree.errors import LumoTreeError
from lumotree.request import SamplingParams
from lumotree.serve.answers import Answer
from lumotree.serve.errors import ApiError
from lumotree.serve.scheduler import Done, Job, Scheduler, Tokens
from lumotree.serve.settings import ServeSettings
from lumotree.serve.stream import DONE, EventStream, event, gone

if TYPE_CHECKING:
    from lumotree.text import ChatTokenizer


class Service:
    """The model behind the routes. max_context: positions of a request, answer included."""

    def __init__(
        self,
        settings: ServeSettings,
        scheduler: Scheduler,
        tokenizer: ChatTokenizer,
        max_context: int,
        vocab_size: int,
    ) -> None:
        self.settings, self.scheduler, self.tokenizer = settings, scheduler, tokenizer
        self.max_context, self._vocab_size = max_context, vocab_size
        self.created = int(time.time())
        # One thread: rendering and tokenising long prompts must not hold up the event loop.
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="encode")

    def close(self) -> None:
        self._encoding.shutdown(cancel_futures=True)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError when another model is asked for."""
        if name is not None and name != self.settings.model_name:
            raise ApiError(
                404,
                f"there is no model '{name}' here; this server has '{self.settings.model_name}'",
                param="model",
                code="model_not_found",
            )

    async def encode(self, encode: Callable[..., list[int]], *args: Any) -> list[int]:
        """Runs a tokenizer method off the event loop. Raises ApiError for what it cannot take."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._encoding, encode, *args)
        except LumoTreeError as error:
            raise ApiError(400, str(error)) from None
        except (TypeError, ValueError, LookupError, RecursionError):
            # Half a surrogate pair is valid JSON and no text.
            raise ApiError(400, "the tokenizer cannot take this text") from None

    def room(self, prompt_ids: Sequence[int]) -> int:
        """Positions left for the answer. Raises ApiError for a prompt that cannot be served."""
        if not prompt_ids:
            raise ApiError(400, "the prompt is empty", param="prompt")
        wrong = next((t for t in prompt_ids if not 0 <= t < self._vocab_size), None)
        if wrong is not None:
            raise ApiError(400, f"token id {wrong} is outside the vocabulary of {self._vocab_size}")
        if len(prompt_ids) >= self.max_context:
            raise ApiError(
                400,
                f"the prompt has {len(prompt_ids)} tokens; the context here holds "
                f"{self.max_context}, answer included",
                code="context_length_exceeded",
            )
        return self.max_context - len(prompt_ids)

    def submit(self, work: Sequence[tuple[list[int], SamplingParams]], top: int | None) -> Running:
        """Queues one job per choice, all or none. Raises ApiError when they are not taken."""
        running = Running()
        deadline = time.monotonic() + self.settings.request_timeout_s
        running.jobs = [
            Job(ids, params, running.receiver(index), deadline, top)
            for index, (ids, params) in enumerate(work)
        ]
        self.scheduler.submit(running.jobs)
        return running

    async def respond(
        self, http: Request, answer: Answer, running: Running, stream: bool, usage: bool
    ) -> Response:
        """The response: whole, or a stream of events (`usage`: with a last event for usage)."""
        if stream:
            chunks = stream_chunks(answer, running, usage)
            return EventStream(chunks, running.cancel, self.settings.idle_timeout_s)
        whole = await whole_or_gone(http, running, collect(answer, running))
        return Response(status_code=499) if whole is None else JSONResponse(whole)


class Running:
    """Jobs under way and what they deliver, in order: (choice index, event)."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self._events: asyncio.Queue = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def receiver(self, index: int) -> Callable[[Any], None]:
        def deliver(what: Any) -> None:
            try:
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, what))
            except RuntimeError:  # the loop has closed: the server is gone
                pass

        return deliver

    def cancel(self) -> None:
        """Ends what is not finished; harmless afterwards."""
        for job in self.jobs:
            job.cancel()

    async def events(self) -> AsyncIterator[tuple[int, Tokens | Done]]:
        """Until every job is done. Raises the ApiError that one of them ended with."""
        left = len(self.jobs)
        while left:
            index, what = await self._events.get()
            if isinstance(what, ApiError):
                raise what
            left -= isinstance(what, Done)
            yield index, what


async def whole_or_gone(
    http: Request, running: Running, collecting: Coroutine[Any, Any, dict[str, Any]]
) -> dict[str, Any] | None:
    """What `collecting` returns, or None when the client leaves before; then nobody reads it."""
    work = asyncio.ensure_future(collecting)
    leaving = asyncio.ensure_future(gone(http.receive))
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        running.cancel()
        for task in (work, leaving):
            task.cancel()


async def collect(answer: Answer, running: Running) -> dict[str, Any]:
    async for index, what in running.events():
        choice = answer.choices[index]
        choice.finish(what.generation) if isinstance(what, Done) else choice.take(what)
    return answer.whole()


async def stream_chunks(answer: Answer, running: Running, usage: bool) -> AsyncIterator[bytes]:
    """Events of the answer; a fault in the middle is an event with `error`, then the end."""
    try:
        for choice in answer.choices:
            part = choice.begin()
            if part is not None:
                yield event(answer.chunk([part]))
        left = len(answer.choices)
        async for index, what in running.events():
            choice, more = answer.choices[index], {}
            if isinstance(what, Done):
                part, left = choice.finish(what.generation), left - 1
                if not left and not usage:
                    more = {"usage": answer.usage()}
            else:
                part = choice.take(what)
            if part is not None:
                yield event(answer.chunk([part], **more))
        if usage:
            yield event(answer.chunk([], usage=answer.usage()))
    except ApiError as error:
        yield event(error.body())
    yield DONE
