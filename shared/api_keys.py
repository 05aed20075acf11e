"""API keys and their file: `outrider key new` prints its lines, gateways and drafters read it.

One line per key, `name:sha256-hex[:max_concurrent[:tokens_per_minute]]`; `#` begins a comment, 0 is no limit. The file
holds hashes; plain SHA-256 is enough for keys of 256 random bits. Several lines may share a name if their limits agree,
for a while two where a key is being replaced.

Not here: who sent a request (gateway/admission/auth.py), and quotas (gateway/admission/quotas.py).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from outrider.shared.errors import ConfigError, Unauthenticated

log = logging.getLogger(__name__)

KEY_PREFIX = "or-"
_NUM_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_NAME_RULE = "a name has 1 to 64 letters, digits and . _ @ -, and begins with a letter or digit"
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_MAX_LIMIT = 10**12
_MAX_FILE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class ApiKey:
    """An API key of the file. Limits apply to the owner, over all of its keys; 0 is no limit."""

    name: str
    digest: bytes
    max_concurrent: int = 0
    tokens_per_minute: int = 0


def new_key() -> str:
    """A new random key: 256 bits, safe in a header and in a shell."""
    return KEY_PREFIX + secrets.token_urlsafe(_NUM_KEY_BYTES)


def key_digest(key: str) -> bytes:
    """The key's 32-byte hash, as in the file."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def key_line(name: str, key: str, max_concurrent: int = 0, tokens_per_minute: int = 0) -> str:
    """The line for the file. Raises ConfigError for an invalid name or limit."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a valid key name: {_NAME_RULE}")
    limits = f":{max_concurrent}:{tokens_per_minute}" if max_concurrent or tokens_per_minute else ""
    line = f"{name}:{key_digest(key).hex()}{limits}"
    parse_key_file(line, "the new key")
    return line


def parse_key_file(text: str, source: str) -> tuple[ApiKey, ...]:
    """Parses a key file. Raises ConfigError that names source and line.

    A file without keys would lock everyone out and is refused.
    """
    keys: list[ApiKey] = []
    by_name: dict[str, tuple[int, ApiKey]] = {}
    line_of_digest: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        where = f"{source} line {number}"
        key = _parse_line(entry, where)
        if key.digest in line_of_digest:
            raise ConfigError(f"{where}: the same key as line {line_of_digest[key.digest]}")
        first_number, first = by_name.setdefault(key.name, (number, key))
        if (first.max_concurrent, first.tokens_per_minute) != (key.max_concurrent, key.tokens_per_minute):
            raise ConfigError(f"{where}: {key.name} has other limits than on line {first_number}")
        line_of_digest[key.digest] = number
        keys.append(key)
    if not keys:
        raise ConfigError(f"{source} has no key; `outrider key new NAME` prints a line for it")
    return tuple(keys)


class KeyRing:
    """The keys of one file. Raises ConfigError when the file is unusable at the start."""

    def __init__(self, path: str, setting: str = "api-keys-file") -> None:
        self._path = Path(path)
        self._source = f"--{setting} {path}"
        self._keys = self._load()

    def reload(self) -> None:
        """Reads the file again. A broken file is logged and changes nothing."""
        try:
            self._keys = self._load()
        except ConfigError as error:
            log.error("the API keys are unchanged: %s", error.message)
        else:
            log.info("%d API keys from %s", len(self._keys), self._path)

    def find(self, authorization: str | None) -> ApiKey:
        """Returns the key in an Authorization header. Raises Unauthenticated."""
        scheme, _, text = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not text.strip():
            raise Unauthenticated("an API key is required: send it as Authorization: Bearer KEY")
        digest = key_digest(text.strip())
        found = None
        # Compares every entry in constant time, so that timing reveals nothing about the keys.
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise Unauthenticated("the API key is unknown")
        return found

    def _load(self) -> tuple[ApiKey, ...]:
        try:
            with self._path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
            text = data.decode("utf-8")
        except OSError as error:
            raise ConfigError(f"{self._source} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{self._source} is not text") from None
        if len(data) > _MAX_FILE_BYTES:
            raise ConfigError(f"{self._source} is over {_MAX_FILE_BYTES} bytes")
        return parse_key_file(text, self._source)


def _parse_line(entry: str, where: str) -> ApiKey:
    # The line may contain a key pasted in plain text: messages never quote it.
    name, *rest = (field.strip() for field in entry.split(":"))
    if not 1 <= len(rest) <= 3:
        raise ConfigError(f"{where}: must be name:sha256-hex[:max_concurrent[:tokens_per_minute]]")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: {_NAME_RULE}")
    if not _DIGEST.fullmatch(rest[0]):
        raise ConfigError(f"{where}: the second field must be the SHA-256 of the key, 64 hexadecimal digits")
    limits = [_parse_limit(text, where) for text in rest[1:]] + [0, 0]
    return ApiKey(name, bytes.fromhex(rest[0]), max_concurrent=limits[0], tokens_per_minute=limits[1])


def _parse_limit(text: str, where: str) -> int:
    if text == "":
        return 0
    if not text.isascii() or not text.isdigit() or int(text[:20]) > _MAX_LIMIT:
        raise ConfigError(f"{where}: a limit must be a whole number from 0 (none) to {_MAX_LIMIT}")
    return int(text)
