"""The bound on a text's characters per token: true for every text, absent where nothing bounds it, told before work."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import tokenizers
from gateway_script import DEMO_TARGET, ScriptedService
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_fallback_backend, wordpiece_tokenizer
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.servers.http.app import create_app


def demo_backend() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))


def with_nfc() -> tokenizers.Tokenizer:
    backend = demo_backend()
    backend.normalizer = normalizers.NFC()
    return backend


TOKENIZERS = {
    name: Tokenizer(make(), {}, None)
    for name, make in (("byte level", demo_backend), ("NFC", with_nfc), ("byte fallback", byte_fallback_backend))
}
# Long runs of one character make the longest tokens; marks that join make the shortest text of a token.
TEXTS = st.one_of(
    st.text(max_size=200),
    st.builds(lambda part, count: part * count, st.text(min_size=1, max_size=3), st.integers(1, 300)),
    st.builds(lambda count: "\u1f82" * count, st.integers(1, 50)),
    st.builds(lambda count: "\u03b1\u0313\u0300\u0345" * count, st.integers(1, 50)),
)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer.most_chars_per_token is not None
    assert len(text) <= tokenizer.most_chars_per_token * len(tokenizer.encode(text, add_special_tokens=False))


def test_the_bound_is_the_longest_token() -> None:
    vocabulary = demo_backend().get_vocab()
    assert TOKENIZERS["byte level"].most_chars_per_token == max(map(len, vocabulary))
    assert TOKENIZERS["NFC"].most_chars_per_token == 4 * max(map(len, vocabulary))


def swallowing() -> tokenizers.Tokenizer:
    backend = demo_backend()
    backend.add_special_tokens([AddedToken("<eat>", rstrip=True, special=True)])
    return backend


def fusing() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True))
    backend.decoder = tokenizers.decoders.Metaspace()
    return backend


def dropping_unknown() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = tokenizers.decoders.Metaspace()
    return backend


def dropping_blanks() -> tokenizers.Tokenizer:
    backend = demo_backend()
    split = pre_tokenizers.Split(Regex(r"\s+"), behavior="removed")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    return backend


def stripping() -> tokenizers.Tokenizer:
    backend = demo_backend()
    backend.normalizer = normalizers.Strip()
    return backend


def shortening() -> tokenizers.Tokenizer:
    backend = demo_backend()
    backend.normalizer = normalizers.Replace("aaaa", "a")
    return backend


def unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0, byte_fallback=False))
    backend.decoder = tokenizers.decoders.Metaspace()
    return backend


@pytest.mark.parametrize(
    "make", [swallowing, fusing, dropping_unknown, dropping_blanks, stripping, shortening, unigram]
)
def test_where_one_token_may_stand_for_any_length_there_is_no_bound(make: Callable[[], Any]) -> None:
    backend = make()
    assert Tokenizer(backend, {}, None).most_chars_per_token is None
    text = {"swallowing": "<eat>" + " " * 5000, "shortening": "a" * 5000}.get(make.__name__, "a" + " " * 5000)
    # Why not: so many characters, so few tokens (the added token, or next to nothing).
    if make is not shortening:
        assert len(backend.encode(text).ids) < 10


def test_a_decoder_that_looks_at_neighbours_has_no_bound() -> None:
    assert wordpiece_tokenizer().most_chars_per_token is None


# ---- at the server ------------------------------------------------------------------------------------------------


@pytest.fixture
def num_encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the texts that were tokenized."""
    lengths: list[int] = []
    encode = Tokenizer.encode

    def watched(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    return lengths


LONG = "word " * 780_000
HUGE_BODIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "one prompt": ("/v1/completions", {"prompt": LONG}, "prompt has 3900000 characters; no token has more than"),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": LONG}]},
        "exceeds the model's context of 512 tokens",
    ),
    "many prompts": ("/v1/completions", {"prompt": ["a"] * 780_000}, "n is 1 for 780000 prompts"),
    "bad words": ("/v1/completions", {"prompt": "a", "bad_words": ["abc"] * 550_000}, "bad_words has 550000 entries"),
}


@pytest.mark.parametrize("name", HUGE_BODIES)
async def test_a_body_of_megabytes_is_refused_before_it_is_tokenized(
    http: httpx.AsyncClient, service: ScriptedService, num_encoded: list[int], name: str
) -> None:
    path, body, message = HUGE_BODIES[name]
    response = await http.post(path, json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert sum(num_encoded) <= 1
    assert service.num_opened == 0


async def test_a_text_that_is_cut_may_be_long(http: httpx.AsyncClient, service: ScriptedService) -> None:
    body = {"prompt": "word " * 20_000, "truncate_prompt_tokens": 20, "max_tokens": 5}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200
    assert len(service.requests[0].prompt_token_ids) == 20


async def longest_pause(service: ScriptedService, data: bytes) -> float:
    """Of the event loop while the body is read and refused, as a share of the time that this takes."""
    longest = 0.0

    async def turn() -> None:
        nonlocal longest
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.002)
            longest = max(longest, time.perf_counter() - started)

    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        turning = asyncio.create_task(turn())
        await asyncio.sleep(0.01)
        started = time.perf_counter()
        response = await client.post("/v1/completions", content=data, headers={"content-type": "application/json"})
        total = time.perf_counter() - started
        await asyncio.sleep(0.01)
        turning.cancel()
    assert response.status_code == 400
    return longest / total


@pytest.mark.parametrize("kind", ["token ids", "many prompts", "bias"])
async def test_streams_go_on_while_megabytes_are_read(service: ScriptedService, kind: str) -> None:
    """On the event loop the work would be one long pause; on a thread no pause is longer than the longest C call.

    A machine that is busy otherwise makes pauses of its own, but not every time; the work would.
    """
    bodies: dict[str, str] = {
        "token ids": json.dumps({"prompt": [5] * 1_300_000}),
        "many prompts": json.dumps({"prompt": ["a"] * 780_000}),
        "bias": json.dumps({"prompt": "a", "logit_bias": {str(number): 1 for number in range(300_000)}}),
    }
    shares: list[float] = []
    while len(shares) < 5 and min(shares, default=1.0) >= 0.6:
        shares.append(await longest_pause(service, bodies[kind].encode()))
    assert min(shares) < 0.6
