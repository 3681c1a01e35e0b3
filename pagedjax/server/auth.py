"""API keys, and the namespace of the prefix cache that a key gets."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from pagedjax.config import ServerConfig
from pagedjax.errors import ConfigError
from pagedjax.server.errors import ApiError

KEYS_VARIABLE = "PAGEDJAX_API_KEYS"
_OPEN_PATH = "/health"


class Auth:
    """ASGI middleware: every path but /health needs one of the keys.

    The decision reads the path as it came over the wire, not a URL built from the Host header, and compares all keys in
    constant time. `scope["pagedjax.tenant"]` then names the key (by a salted digest), "" where no keys are configured.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], secret: bytes = b""):
        self.app = app
        # The engine's own words: a key keeps its name, and so its cached prefixes, in a server that starts from a snapshot.
        self._secret = hashlib.sha256(b"tenant" + secret).digest() if secret else secrets.token_bytes(16)
        self._digests = [self._digest(key.encode()) for key in keys]

    def _digest(self, key: bytes) -> bytes:
        return hmac.new(self._secret, key, hashlib.sha256).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and not self._open(scope):
            tenant = self._tenant(scope)
            if tenant is None:
                error = ApiError(
                    401,
                    "a valid API key is needed: Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error.response()(scope, receive, send)
                return
            scope["pagedjax.tenant"] = tenant
        await self.app(scope, receive, send)

    def _open(self, scope: Scope) -> bool:
        return scope["path"] == _OPEN_PATH and scope.get("raw_path", b"").partition(b"?")[0] == _OPEN_PATH.encode()

    def _tenant(self, scope: Scope) -> str | None:
        values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest = self._digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, without an early exit
        return digest.hex()[:16] if any(matches) else None


def load_keys(config: ServerConfig) -> tuple[str, ...]:
    """The keys of the configuration, of its key file and of the environment; ConfigError where one cannot be used."""
    keys = [*config.api_keys, *os.environ.get(KEYS_VARIABLE, "").split(",")]
    if config.api_key_file:
        try:
            with open(config.api_key_file, encoding="utf-8") as file:
                keys += file.read().splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"config.server.api_key_file: cannot read {config.api_key_file!r}: {e}") from None
    keys = [key.strip() for key in keys if key.strip()]
    for number, key in enumerate(keys, 1):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"API key number {number}: must be printable ASCII without spaces")
    if config.api_key_file and not keys:
        raise ConfigError(f"config.server.api_key_file: {config.api_key_file!r} holds no key")
    return tuple(dict.fromkeys(keys))


def check_reachability(config: ServerConfig, keys: Sequence[str]) -> None:
    """Refuses an address that others can reach when there is no key, unless config.server.allow_open says so."""
    if keys or config.allow_open or is_loopback(config.host):
        return
    raise ConfigError(
        f"config.server.host: {config.host!r} can be reached by others and there is no API key; set "
        f"config.server.api_key_file or {KEYS_VARIABLE}, or --config.server.allow_open if that is what you want"
    )


def is_loopback(host: str) -> bool:
    """True if every address of `host` is a loopback one; "" means all interfaces."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None) if host else []
    except (OSError, UnicodeError):
        return False
    addresses = {str(entry[4][0]).split("%")[0] for entry in found}
    return bool(addresses) and all(ipaddress.ip_address(a).is_loopback for a in addresses)
