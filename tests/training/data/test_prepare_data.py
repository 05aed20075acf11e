"""Asking a server for training text: what is sent, what is written, what a failing server leads to."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.training.data.completion_client import FatalServerError
from outrider.training.data.prepare_data import PrepareConfig, PrepareResult, prepare, sample_seed
from outrider.training.data.prompts import Prompt
from outrider.training.errors import SettingError
from outrider.training.progress import Progress
from tests.training.data.scripted_server import completion, scripted_server

PROMPTS = [Prompt(text=f"prompt {index}") for index in range(6)]


def quiet() -> Progress:
    return Progress(Console(quiet=True), "completions")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def config_for(url: str, output: Path, **fields: Any) -> PrepareConfig:
    config = PrepareConfig(base_url=url, model="m", output=output, temperatures=(0.0,), max_retries=3)
    return replace(config, **fields)


def echo(_path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    text = body["prompt"] if isinstance(body.get("prompt"), str) else "ids"
    return 200, {}, completion(f"after {text}", token_ids=[1, 2], prompt_token_ids=[7])


async def test_rows_hold_question_and_answer(tmp_path: Path) -> None:
    out = tmp_path / "data.jsonl"
    with scripted_server(echo) as server:
        config = config_for(server.url, out, temperatures=(0.0, 0.7), num_samples=2, seed=5, api_key="k", max_tokens=9)
        result = await prepare([*PROMPTS[:2], PROMPTS[0], Prompt(token_ids=(4, 5))], config, quiet())
    # Three different prompts, each greedy once and twice at 0.7.
    assert result == PrepareResult(9, 0, 0, ())
    rows = read(out)
    assert len({row["id"] for row in rows}) == 9
    asked = Counter((json.dumps(row["prompt"]), row["temperature"], row["seed"]) for row in rows)
    wanted = ['"prompt 0"', '"prompt 1"', "[4, 5]"]
    assert asked == Counter((text, *rest) for text in wanted for rest in ((0.0, 5), (0.7, 5), (0.7, 182005398633653)))
    (row,) = [row for row in rows if row["prompt"] == "prompt 1" and row["temperature"] == 0]
    assert row["completion"] == "after prompt 1"
    assert (row["prompt_token_ids"], row["token_ids"], row["max_tokens"]) == ([7], [1, 2], 9)
    for path, body, headers in server.requests:
        assert path == "/v1/completions"
        assert (body["model"], body["max_tokens"], body["return_token_ids"]) == ("m", 9, True)
        assert headers["authorization"] == "Bearer k"


def test_runs_with_neighbouring_seeds_share_no_sample() -> None:
    """A run's samples are held out from another's."""
    one, other = ([sample_seed(seed, sample) for sample in range(10_000)] for seed in (11, 57))
    assert len({*one, *other}) == 20_000
    assert max(*one, *other) < 2**53  # exact in JSON
    assert one[0] == 11


async def test_chats_go_to_the_chat_route(tmp_path: Path) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        assert path == "/v1/chat/completions"
        return 200, {}, {"choices": [{"message": {"content": "hi"}}], "prompt_token_ids": [3]}

    messages = ({"role": "user", "content": "hello"},)
    with scripted_server(answer) as server:
        await prepare([Prompt(messages=messages)], config_for(server.url, tmp_path / "d.jsonl"), quiet())
    (row,) = read(tmp_path / "d.jsonl")
    assert row["messages"] == list(messages)
    assert (row["completion"], row["prompt_token_ids"]) == ("hi", [3])
    assert "token_ids" not in row


async def test_a_second_run_asks_only_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "data.jsonl"
    with scripted_server(echo) as server:
        config = config_for(server.url, out)
        await prepare(PROMPTS[:4], config, quiet())
        whole = out.read_bytes()
        # The third row is torn in the middle, as a kill may leave it.
        lines = whole.splitlines(keepends=True)
        out.write_bytes(b"".join(lines[:2]) + lines[2][:-9])
        server.requests.clear()
        result = await prepare(PROMPTS, config, quiet())
    assert result == PrepareResult(4, 2, 0, ())
    assert len(server.requests) == 4
    assert sorted(row["prompt"] for row in read(out)) == [f"prompt {index}" for index in range(6)]


async def test_trouble_is_waited_out(tmp_path: Path) -> None:
    """Each prompt meets a dropped connection, a 503 and a 429 before its answer."""
    seen: Counter[str] = Counter()
    troubles = [(0, {}, None), (503, {}, "overloaded"), (429, {"retry-after": "0"}, {"error": {"message": "slow"}})]

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        seen[body["prompt"]] += 1
        attempt = seen[body["prompt"]]
        return troubles[attempt - 1] if attempt <= 3 else echo(path, body)

    with scripted_server(answer) as server:
        result = await prepare(PROMPTS[:3], config_for(server.url, tmp_path / "d.jsonl"), quiet())
    assert result == PrepareResult(3, 0, 0, ())
    assert set(seen.values()) == {4}


async def test_patience_ends_and_the_prompt_is_asked_again_by_the_next_run(tmp_path: Path) -> None:
    out = tmp_path / "d.jsonl"

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        return (500, {}, {"error": {"message": "broken"}}) if body["prompt"] == "prompt 1" else echo(path, body)

    with scripted_server(answer) as server:
        result = await prepare(PROMPTS[:3], config_for(server.url, out, max_retries=1), quiet())
        assert (result.num_written, result.num_refused) == (2, 1)
        assert result.problems == ("status 500: broken (after 1 retries)",)
    with scripted_server(echo) as server:
        assert await prepare(PROMPTS[:3], config_for(server.url, out), quiet()) == PrepareResult(1, 2, 0, ())


async def test_a_refused_prompt_is_not_asked_twice_in_a_run(tmp_path: Path) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        return (400, {}, {"error": {"message": "too long"}}) if body["prompt"] == "prompt 0" else echo(path, body)

    with scripted_server(answer) as server:
        result = await prepare(PROMPTS[:2], config_for(server.url, tmp_path / "d.jsonl"), quiet())
    assert result == PrepareResult(1, 0, 1, ("status 400: too long",))
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [401, 404])
async def test_what_no_prompt_can_pass_ends_the_run(tmp_path: Path, status: int) -> None:
    with scripted_server(lambda _path, _body: (status, {}, {"error": "no such key"})) as server:
        with pytest.raises(FatalServerError, match=f"status {status}: no such key"):
            await prepare(PROMPTS, config_for(server.url, tmp_path / "d.jsonl", concurrency=1), quiet())
        assert len(server.requests) == 1


async def test_a_server_that_does_not_know_token_ids(tmp_path: Path) -> None:
    def answer(_path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        if "return_token_ids" in body:
            return 400, {}, {"error": {"message": "Unrecognized request argument supplied: return_token_ids"}}
        return 200, {}, completion("plain")

    with scripted_server(answer) as server:
        result = await prepare(PROMPTS[:3], config_for(server.url, tmp_path / "d.jsonl", concurrency=1), quiet())
        assert len(server.requests) == 4
    assert result.num_written == 3
    assert all("token_ids" not in row for row in read(tmp_path / "d.jsonl"))


@pytest.mark.parametrize("reply", ["<html>", {"choices": []}, {"choices": [{"text": 3}]}, []])
async def test_an_answer_that_is_no_completion(tmp_path: Path, reply: Any) -> None:
    with scripted_server(lambda _path, _body: (200, {}, reply)) as server:
        result = await prepare(PROMPTS[:1], config_for(server.url, tmp_path / "d.jsonl"), quiet())
    assert result.num_refused == 1
    assert "is not a completion" in result.problems[0]


async def test_the_model_is_asked_for(tmp_path: Path) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        return (200, {}, {"data": [{"id": "served"}]}) if path == "/v1/models" else echo(path, body)

    with scripted_server(answer) as server:
        await prepare(PROMPTS[:1], config_for(server.url, tmp_path / "d.jsonl", model=""), quiet())
    assert server.bodies()[-1]["model"] == "served"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "--max-tokens must be at least 1"),
        ({"temperatures": ()}, "--temperature must be"),
        ({"temperatures": (-1.0,)}, "--temperature must be"),
        ({"temperatures": (float("nan"),)}, "--temperature must be"),
        ({"base_url": "localhost:8000"}, "--base-url must begin"),
    ],
)
async def test_settings_that_cannot_be(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        await prepare(PROMPTS, config_for("http://localhost:1", tmp_path / "d.jsonl", **fields), quiet())
