"""API keys and the file that holds them: what `outrider key new` prints and what the gateway reads.

One line per key, `name:sha256-hex[:max_concurrent[:tokens_per_minute]]`; `#` begins a comment, 0 is no limit. The file
holds hashes only. A plain SHA-256 is enough for them: a key has 256 random bits, so there is nothing to guess.
Several lines may carry one name with the same limits: an owner who changes keys has two for a while.

Not here: who may do what with a key (gateway/auth.py) and the counting (gateway/quotas.py).
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass

from shared.errors import ConfigError

KEY_PREFIX = "or-"
_NUM_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_NAME_RULE = "a name has 1 to 64 letters, digits and . _ @ -, and begins with a letter or digit"
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_MAX_LIMIT = 10**12


@dataclass(frozen=True)
class ApiKey:
    """One entry. Limits are the owner's, over all of its keys; 0 is none."""

    name: str
    digest: bytes
    max_concurrent: int = 0
    tokens_per_minute: int = 0


def new_key() -> str:
    """A key that nobody has: 256 random bits, safe in a header and in a shell."""
    return KEY_PREFIX + secrets.token_urlsafe(_NUM_KEY_BYTES)


def key_digest(key: str) -> bytes:
    """What the file holds of a key, as 32 bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def key_line(name: str, key: str, max_concurrent: int = 0, tokens_per_minute: int = 0) -> str:
    """The line for the file. Raises ConfigError for a name or a limit that cannot stand there."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot name a key: {_NAME_RULE}")
    limits = f":{max_concurrent}:{tokens_per_minute}" if max_concurrent or tokens_per_minute else ""
    line = f"{name}:{key_digest(key).hex()}{limits}"
    parse_key_file(line, "the new key")
    return line


def parse_key_file(text: str, source: str) -> tuple[ApiKey, ...]:
    """Raises ConfigError that names source and line. A file without a key would lock everyone out and is refused."""
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
        raise ConfigError(f"{source} holds no key; `outrider key new NAME` prints a line for it")
    return tuple(keys)


def _parse_line(entry: str, where: str) -> ApiKey:
    # The line may hold a key that was pasted in plain: it is never repeated in the message.
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
