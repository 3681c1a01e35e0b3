"""The ASGI application: routes, and the layers around them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pagedjax.errors import PagedJaxError
from pagedjax.server import tokens
from pagedjax.server.auth import Auth
from pagedjax.server.chat import create_chat_completion
from pagedjax.server.completions import create_completion
from pagedjax.server.errors import ApiError, as_api_error, from_validation
from pagedjax.server.guard import Guard
from pagedjax.server.limits import Limits
from pagedjax.server.metrics import CONTENT_TYPE, Metrics
from pagedjax.server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from pagedjax.server.rendering import json_response
from pagedjax.server.state import ServerState
from pagedjax.server.vocabulary import Vocabulary

VERSION = importlib.metadata.version("pagedjax")


def create_app(engine: Any, api_keys: Sequence[str] = ()) -> FastAPI:
    """The application around a started `AsyncEngine`; `app.state.server` is its `ServerState`.

    Args:
      engine: an `AsyncEngine`; its `config.server` has the limits.
      api_keys: keys that clients must send; none: open to everybody who can connect.
    """
    metrics = Metrics(engine)
    state = ServerState(engine, metrics, Vocabulary(engine.tokenizer))
    app = FastAPI(title="pagedjax", version=VERSION, docs_url=None, redoc_url=None)
    app.state.server = state
    _add_error_handlers(app)
    _add_generation(app, state)
    _add_information(app, state)
    limits = engine.config.server
    app.add_middleware(
        Limits,
        max_head_bytes=limits.max_header_bytes,
        max_bytes=limits.max_body_bytes,
        seconds=limits.receive_seconds,
    )
    app.add_middleware(Auth, keys=api_keys, secret=engine.secret)
    app.add_middleware(Guard, metrics=metrics)  # the last one added is the outermost
    return app


def _add_error_handlers(app: FastAPI) -> None:
    def answer(request: HttpRequest, error: Exception) -> Response:
        return as_api_error(error, request.scope.get("pagedjax.request_id", "")).response()

    def invalid(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return from_validation(error.errors()).response()

    app.add_exception_handler(ApiError, answer)
    app.add_exception_handler(PagedJaxError, answer)
    app.add_exception_handler(HTTPException, answer)
    app.add_exception_handler(RequestValidationError, invalid)


def _check_model(state: ServerState, name: str | None) -> None:
    if name is not None and name != state.engine.model_name:
        raise ApiError(
            404,
            f"model: {name[:200]!r} is not served here; {state.engine.model_name!r} is",
            param="model",
            code="model_not_found",
        )


def _add_generation(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/completions")
    async def completions(request: HttpRequest, body: CompletionRequest) -> Response:
        _check_model(state, body.model)
        return await create_completion(state, request, body)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: HttpRequest, body: ChatCompletionRequest) -> Response:
        _check_model(state, body.model)
        return await create_chat_completion(state, request, body)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        _check_model(state, body.model)
        return await tokens.tokenize(state, body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        _check_model(state, body.model)
        return await tokens.detokenize(state, body)


def _add_information(app: FastAPI, state: ServerState) -> None:
    engine = state.engine

    def card() -> dict[str, Any]:
        return {
            "id": engine.model_name,
            "object": "model",
            "created": state.started,
            "owned_by": "pagedjax",
            "max_model_len": engine.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        _check_model(state, name)
        return json_response(card())

    @app.get("/health")
    async def health() -> Response:
        status = "draining" if state.draining else "ok" if engine.is_alive else "dead"
        return json_response({"status": status}, 200 if status == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.render(), headers={"content-type": CONTENT_TYPE})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": VERSION})
