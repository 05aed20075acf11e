"""Who is asking: the keys that are known, and the caller that a request carries from the door to the work behind it.

`KeyRing` reads the key file (shared/api_keys.py says what stands in it) and finds a key. The doors put a `Caller` on
every request: on the ASGI scope, or on the context that a gRPC method gets. `caller_of` and `owner_of` read it.

Not here: what a caller may use (quotas.py), and the doors themselves (http_admission.py, grpc_admission.py).
"""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.quotas import Account
from shared.api_keys import ApiKey, key_digest, parse_key_file
from shared.errors import ConfigError, Unauthenticated

log = logging.getLogger(__name__)

_CALLER = "outrider.caller"
_MAX_FILE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Caller:
    """`owner` is the key's name, "" where no keys are asked for; `account` is what it uses, None if nothing counts."""

    owner: str = ""
    account: Account | None = None


NOBODY = Caller()


class KeyRing:
    """The keys of one file. Raises ConfigError when the file cannot be used at the start."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._keys = self._load()

    def reload(self) -> None:
        """Takes the file as it is now. A broken one changes nothing, so that it locks nobody out."""
        try:
            self._keys = self._load()
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error.message)
        else:
            log.info("%d API keys from %s", len(self._keys), self._path)

    def find(self, authorization: str | None) -> ApiKey:
        """The key in an Authorization header's value. Raises Unauthenticated."""
        scheme, _, text = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not text.strip():
            raise Unauthenticated("an API key is needed: send it as Authorization: Bearer KEY")
        digest = key_digest(text.strip())
        found = None
        # Every entry is compared, in constant time: how long it takes says nothing about which key it was.
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise Unauthenticated("the API key is not known here")
        return found

    def _load(self) -> tuple[ApiKey, ...]:
        try:
            with self._path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
            text = data.decode("utf-8")
        except OSError as error:
            raise ConfigError(f"--api-keys-file {self._path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"--api-keys-file {self._path} is not text") from None
        if len(data) > _MAX_FILE_BYTES:
            raise ConfigError(f"--api-keys-file {self._path} is over {_MAX_FILE_BYTES} bytes")
        return parse_key_file(text, f"--api-keys-file {self._path}")


class CallerContext:
    """A gRPC context with a caller; all else is the context's own. (gRPC's class takes no attributes.)"""

    def __init__(self, context: Any, caller: Caller) -> None:
        self._context = context
        self.caller = caller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def put_caller(scope: Any, caller: Caller) -> None:
    """For the REST door: on the ASGI scope of the request."""
    scope[_CALLER] = caller


def caller_of(request_or_context: Any) -> Caller:
    """The caller of a Starlette request or of a gRPC context; NOBODY where no door has put one."""
    if isinstance(request_or_context, CallerContext):
        return request_or_context.caller
    scope = getattr(request_or_context, "scope", None)
    caller = scope.get(_CALLER) if isinstance(scope, dict) else None
    return caller if isinstance(caller, Caller) else NOBODY


def owner_of(request_or_context: Any) -> str:
    """The name of the API key that the request came with; "" where keys are not asked for."""
    return caller_of(request_or_context).owner
