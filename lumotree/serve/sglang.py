"""SGLang's native endpoint, so that tools which speak it find the same decoder behind it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from lumotree.errors import RequestError
from lumotree.request import SamplingParams
from lumotree.serve.errors import ApiError
from lumotree.serve.scheduler import Done
from lumotree.serve.service import Running, Service, whole_or_gone
from lumotree.serve.stream import DONE, EventStream, event
from lumotree.serve.wire import SEED_BITS


class SamplingFields(BaseModel):
    """SGLang's names and defaults; top_k -1 is off."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(-1, ge=-1)
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = Field(128, ge=1)
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None

    def params(self, room: int) -> SamplingParams:
        """Raises ApiError for a value out of range."""
        same = self.model_dump(exclude={"top_k", "max_new_tokens", "stop", "sampling_seed"})
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        seed = self.sampling_seed
        try:
            return SamplingParams(
                **same,
                top_k=max(self.top_k, 0),
                max_tokens=min(self.max_new_tokens, room),
                stop=tuple(stop),
                seed=secrets.randbits(SEED_BITS) if seed is None else seed,
            )
        except RequestError as error:
            raise ApiError(400, str(error)) from None


class GenerateRequest(BaseModel):
    """POST /generate; one of text and input_ids."""

    model_config = ConfigDict(extra="forbid")
    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingFields = Field(default_factory=SamplingFields)
    stream: bool = False


def add_sglang_routes(app: FastAPI, service: Service, about: dict[str, Any]) -> None:
    """`about` is what /server_info says."""

    @app.get("/server_info")
    def server_info() -> dict[str, Any]:
        return {"model_path": service.settings.model_name, **about}

    @app.post("/generate")
    async def generate(request: GenerateRequest, http: Request) -> Response:
        if (request.text is None) == (request.input_ids is None):
            raise ApiError(400, "name one of text and input_ids")
        ids = request.input_ids
        if ids is None:
            ids = await service.encode(service.tokenizer.encode, request.text)
        params = request.sampling_params.params(service.room(ids))
        running = service.submit([(ids, params)], top=None)
        if request.stream:
            return EventStream(stream(running), running.cancel, service.settings.idle_timeout_s)
        whole = await whole_or_gone(http, running, last(running))
        return Response(status_code=499) if whole is None else JSONResponse(whole)


async def cumulative(running: Running) -> AsyncIterator[dict[str, Any]]:
    """SGLang's events: everything so far in each; the last one with counts."""
    ids: list[int] = []
    text = ""
    async for _, what in running.events():
        if isinstance(what, Done):
            ids += [] if what.stop_id is None else [what.stop_id]
            yield {"text": text, "output_ids": ids, "meta_info": meta(what)}
            return
        ids += what.ids
        text += what.text
        counts = {"completion_tokens": len(ids), "finish_reason": None}
        prompt = {"prompt_tokens": len(running.jobs[0].prompt_ids)}
        yield {"text": text, "output_ids": ids, "meta_info": counts | prompt}


async def stream(running: Running) -> AsyncIterator[bytes]:
    try:
        async for value in cumulative(running):
            yield event(value)
    except ApiError as error:
        yield event(error.body())
    yield DONE


async def last(running: Running) -> dict[str, Any]:
    value = {}
    async for each in cumulative(running):
        value = each
    return value


def meta(done: Done) -> dict[str, Any]:
    """meta_info of a finished request."""
    generation = done.generation
    steps, depths = generation.steps, generation.accepted_by_depth
    reached = [steps, *depths, 0]
    exactly = [here - deeper for here, deeper in zip(reached, reached[1:], strict=False)]
    reason: dict[str, Any] = {"type": generation.finish_reason}
    if generation.finish_reason == "length":
        reason["length"] = generation.completion_tokens
    elif done.stop_id is not None:
        reason["matched"] = done.stop_id
    return {
        "finish_reason": reason,
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.completion_tokens,
        "cached_tokens": generation.prefix_reused_tokens,
        "e2e_latency": generation.e2e_s,
        "spec_verify_ct": steps,
        "spec_correct_drafts_histogram": exactly,
        "spec_accept_length": 1 + sum(depths) / steps if steps else None,
    }
