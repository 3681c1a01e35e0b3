"""Errors in the shape that OpenAI clients read: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from pagedjax.errors import EngineDeadError, InvalidRequestError, QueueFullError
from pagedjax.server.rendering import json_response

logger = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable",
    504: "timeout_error",
}
_RETRY_SECONDS = "1"  # a step is a fraction of a second, so a place in the queue comes free soon


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
      status: HTTP status.
      message: what is wrong, for the client's eyes.
      param: the request's field at fault, dotted.
      code: a word that programs can test.
      headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self):
        return json_response(self.body(), self.status, self.headers)


def missed_deadline() -> ApiError:
    # OpenAI's clients send a request that got a 5xx once more, unless they are told otherwise: this one is too late.
    return ApiError(
        504,
        "deadline_ms: passed before there was a first token",
        param="deadline_ms",
        code="deadline_exceeded",
        headers={"x-should-retry": "false"},
    )


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "30"})


def as_api_error(error: Exception, request_id: str, aliases: Mapping[str, str] | None = None) -> ApiError:
    """What the client is told about `error`; anything unforeseen is logged and answered without its details.

    Args:
      error: what was raised while serving.
      request_id: named in the answer to an internal error, and in the log, so that the two can be matched.
      aliases: engine's field name -> the client's (`max_tokens` -> `max_completion_tokens`).
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        field = (aliases or {}).get(error.field, error.field)
        return ApiError(400, f"{field}: {error.message}", param=field, code="invalid_value")
    if isinstance(error, QueueFullError):
        return ApiError(
            429, "too many requests are waiting", code="queue_full", headers={"Retry-After": _RETRY_SECONDS}
        )
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_unavailable")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    logger.error("request %s failed", request_id, exc_info=error)
    return ApiError(
        500, f"internal error; the server's log has the details under request {request_id}", code="internal"
    )


def from_validation(errors: Sequence[Any]) -> ApiError:
    """One 400 from pydantic's list of errors: the first one, with its field; the client's values are not repeated."""
    first = errors[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(
            400, f"the body is not JSON: {first.get('ctx', {}).get('error', 'malformed')}", code="invalid_json"
        )
    if not path:
        return ApiError(
            400, "the body must be a JSON object, sent as Content-Type: application/json", code="invalid_json"
        )
    field = ".".join(path)
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return ApiError(400, f"{field}: {first['msg']}", param=field, code=code)
