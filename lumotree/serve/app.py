"""The routes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from lumotree.serve.answers import Answer, ChatChoice, TextChoice
from lumotree.serve.errors import ApiError
from lumotree.serve.limits import Limits
from lumotree.serve.metrics import CONTENT_TYPE, Metrics
from lumotree.serve.service import Service
from lumotree.serve.tools import ToolCallParser
from lumotree.serve.wire import ChatRequest, CompletionRequest

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in {
        400: "The request cannot be served; `error` says why.",
        401: "The API key is missing or wrong.",
        404: "There is no such model.",
        408: "The body did not arrive in time.",
        413: "The body is too large.",
        422: "Not used; faults of the body are 400.",
        429: "The queue is full; retry-after says when to try again.",
        503: "The server is shutting down.",
        504: "The request took too long.",
    }.items()
}


def create_app(service: Service, metrics: Metrics) -> FastAPI:
    """The application over a started scheduler."""
    app = FastAPI(title="lumotree", docs_url=None, redoc_url=None)
    settings = service.settings
    app.add_middleware(
        Limits,
        api_key=settings.api_key,
        max_body_bytes=settings.max_body_bytes,
        idle_timeout_s=settings.idle_timeout_s,
    )
    add_error_handlers(app)

    @app.get("/health", responses={503: REFUSALS[503]})
    def health() -> Response:
        """200 while requests are taken."""
        active, waiting = service.scheduler.load
        ok = service.scheduler.alive and not service.scheduler.draining
        state = {"status": "ok" if ok else "stopping", "active": active, "waiting": waiting}
        return JSONResponse(state, 200 if ok else 503)

    @app.get("/metrics", response_class=Response)
    def read_metrics() -> Response:
        """Counters for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    def model() -> dict[str, Any]:
        return {
            "id": settings.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "lumotree",
            "max_model_len": service.max_context,
        }

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}", responses={404: REFUSALS[404]})
    def one_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model()

    @app.post("/v1/chat/completions", responses=REFUSALS)
    async def chat(request: ChatRequest, http: Request) -> Response:
        service.check_model(request.model)
        request.refuse()
        tools = request.offered
        ids = await service.encode(service.tokenizer.encode_chat, request.conversation(), tools)
        params = request.params(service.room(ids))
        running = service.submit([(ids, each) for each in params], request.top)
        single = request.parallel_tool_calls is False
        choices = [
            ChatChoice(
                index,
                ids,
                service.tokenizer,
                request.return_token_ids,
                parser=ToolCallParser(tools, single) if tools else None,
                top=request.top,
            )
            for index in range(len(params))
        ]
        answer = Answer("chat.completion", settings.model_name, choices, len(params))
        return await service.respond(http, answer, running, *streaming(request))

    @app.post("/v1/completions", responses=REFUSALS)
    async def completions(request: CompletionRequest, http: Request) -> Response:
        service.check_model(request.model)
        request.refuse()
        work = []
        for prompt in request.prompts():
            ids = prompt
            if isinstance(prompt, str):
                ids = await service.encode(service.tokenizer.encode, prompt)
            work += [(ids, each) for each in request.params(service.room(ids))]
        running = service.submit(work, request.top)
        choices = [
            TextChoice(index, ids, service.tokenizer, request.return_token_ids, top=request.top)
            for index, (ids, _) in enumerate(work)
        ]
        answer = Answer("text_completion", settings.model_name, choices, request.choices)
        return await service.respond(http, answer, running, *streaming(request))

    return app


def streaming(request: ChatRequest | CompletionRequest) -> tuple[bool, bool]:
    """Whether to stream, and whether usage is an event of its own."""
    options = request.stream_options
    return bool(request.stream), options is not None and options.include_usage


def add_error_handlers(app: FastAPI) -> None:
    """Every fault in OpenAI's shape."""

    @app.exception_handler(ApiError)
    def api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        refusal = explain(error)
        return JSONResponse(refusal.body(), refusal.status)

    @app.exception_handler(HTTPException)
    def http_error(http: Request, error: HTTPException) -> JSONResponse:
        said = {404: f"there is no {http.url.path}", 405: f"{http.method} is not served here"}
        text = said.get(error.status_code, str(error.detail))
        refusal = ApiError(error.status_code, text)
        return JSONResponse(refusal.body(), error.status_code, error.headers)

    @app.exception_handler(Exception)
    def fault(_: Request, error: Exception) -> JSONResponse:
        refusal = ApiError(500, f"an internal error: {type(error).__name__}")
        return JSONResponse(refusal.body(), 500)


def explain(error: RequestValidationError) -> ApiError:
    """The first fault of a body, by field."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    name = ".".join(place)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"field '{name}' is not served", param=name)
    return ApiError(400, f"{name or 'body'}: {first['msg']}", param=name or None)
