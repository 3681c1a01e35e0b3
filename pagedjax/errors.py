"""The exceptions that cross the host boundary. Running out of pages is a value, never one of these."""

from __future__ import annotations


class PagedJaxError(Exception):
    """Base of every error that pagedjax raises on purpose."""


class InvalidRequestError(PagedJaxError, ValueError):
    """A request that cannot be served as it stands. The server answers HTTP 400 with `field`.

    Attributes:
      field: the request field at fault, in the client's spelling (`max_tokens`, `logit_bias`, ...).
      message: what is wrong, the value and the limit.
    """

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ConfigError(PagedJaxError, ValueError):
    """A configuration key or value that cannot be used; names the key, the value and the range."""


class ModelLoadError(PagedJaxError):
    """A model directory, file or checkpoint that is missing, damaged or of an unsupported kind; says what to do."""


class SnapshotError(PagedJaxError):
    """A snapshot or trace that is damaged, or belongs to another model or to an engine of another shape; names both."""


class QueueFullError(PagedJaxError):
    """The waiting queue is at its bound. The server answers HTTP 429 with Retry-After."""


class EngineDeadError(PagedJaxError):
    """The engine stopped after an internal error; the server answers HTTP 503 from then on."""
