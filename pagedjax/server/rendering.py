"""Python values to JSON bytes. NaN and infinities are not JSON: they are an error here, never sent."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

LOWEST_LOGPROB = -9999.0


def to_json(value: Any) -> bytes:
    """Compact UTF-8 JSON. Raises ValueError for a float that is not finite."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status, dict(headers or {}), media_type="application/json")


def finite(logprob: float) -> float | None:
    """A log-probability as clients expect it: a masked token's -inf becomes -9999, NaN becomes null."""
    if math.isnan(logprob):
        return None
    return max(logprob, LOWEST_LOGPROB) if logprob < 0 else 0.0
