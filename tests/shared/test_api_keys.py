"""The file of API keys: what is read, what is refused, and that no message repeats what may be a key."""

from __future__ import annotations

import hashlib

import pytest

from outrider.shared.api_keys import key_digest, key_line, new_key, parse_key_file
from outrider.shared.errors import ConfigError

HASH = "ab" * 32
OTHER_HASH = "cd" * 32


def test_a_file() -> None:
    text = f"# people\nalice:{HASH}\n\n  bob.b@x : {OTHER_HASH.upper()} : 4 : 60000  # for the batch\n"
    alice, bob = parse_key_file(text, "keys")
    assert (alice.name, alice.digest, alice.max_concurrent, alice.tokens_per_minute) == ("alice", b"\xab" * 32, 0, 0)
    assert (bob.name, bob.digest, bob.max_concurrent, bob.tokens_per_minute) == ("bob.b@x", b"\xcd" * 32, 4, 60000)


def test_a_limit_may_be_left_out() -> None:
    [key] = parse_key_file(f"a:{HASH}::500", "keys")
    assert (key.max_concurrent, key.tokens_per_minute) == (0, 500)
    [key] = parse_key_file(f"a:{HASH}:3", "keys")
    assert (key.max_concurrent, key.tokens_per_minute) == (3, 0)


def test_an_owner_may_have_two_keys() -> None:
    keys = parse_key_file(f"a:{HASH}:2\na:{OTHER_HASH}:2", "keys")
    assert [key.name for key in keys] == ["a", "a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "keys has no key"),
        ("# only this\n", "keys has no key"),
        ("alice", "keys line 1: must be name:sha256-hex"),
        (f"\na:{HASH}:1:2:3", "keys line 2: must be name:sha256-hex"),
        (f"a b:{HASH}", "keys line 1: a name has 1 to 64 letters"),
        (f":{HASH}", "keys line 1: a name has 1 to 64 letters"),
        ("alice:or-secretsecret", "keys line 1: the second field must be the SHA-256"),
        (f"a:{HASH[1:]}", "keys line 1: the second field must be the SHA-256"),
        (f"a:{HASH}:-1", "keys line 1: a limit must be a whole number"),
        (f"a:{HASH}:1.5", "keys line 1: a limit must be a whole number"),
        (f"a:{HASH}:²", "keys line 1: a limit must be a whole number"),
        (f"a:{HASH}:{'9' * 5000}", "keys line 1: a limit must be a whole number"),
        (f"a:{HASH}\nb:{HASH}", "keys line 2: the same key as line 1"),
        (f"a:{HASH}:1\na:{OTHER_HASH}:2", "keys line 2: a has other limits than on line 1"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_key_file(text, "keys")
    assert raised.value.message.startswith(message)
    assert "secret" not in raised.value.message


def test_new_keys() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) >= 43 and key.isascii() and key.isprintable() and " " not in key for key in keys)


def test_the_line_holds_the_hash_and_not_the_key() -> None:
    key = new_key()
    line = key_line("alice", key, 2, 1000)
    assert key not in line
    [entry] = parse_key_file(line, "keys")
    assert entry.digest == key_digest(key) == hashlib.sha256(key.encode()).digest()
    assert (entry.name, entry.max_concurrent, entry.tokens_per_minute) == ("alice", 2, 1000)
    with pytest.raises(ConfigError, match="is not a valid key name"):
        key_line("al:ice", key)
