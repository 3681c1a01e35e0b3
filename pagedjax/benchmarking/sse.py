"""Server-sent events out of a stream of bytes, however it is cut."""

from __future__ import annotations


class EventDecoder:
    """Collects bytes and gives out the data of whole events. Comments and other fields are passed over."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that `data` completes, in order."""
        data = self._rest + data
        held = b""
        if b"\r" in data:
            if data.endswith(b"\r"):  # the other half of this line end may follow
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, rest = data.split(b"\n\n")
        self._rest = rest + held
        return [found for event in events if (found := _data_of(event)) is not None]

    def close(self) -> list[bytes]:
        """At the end of the stream: an event that lacks only the empty line behind it."""
        rest, self._rest = self._rest, b""
        found = _data_of(rest.replace(b"\r", b"\n"))
        return [] if found is None else [found]


def _data_of(event: bytes) -> bytes | None:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
