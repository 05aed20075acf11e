"""Prompts that the model writes: what is asked of the server, which turns are kept, and servers that cannot do it.

Headers are those of the gateway's own rendering; turns are scripted. The whole path: test_through_a_gateway.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.gateway.openai.convert import chat_token_ids
from outrider.gateway.openai.schema import TokenizeChatRequest, parse_body
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.training.commands.app import app
from outrider.training.data.prepare_data import PrepareConfig, sample_seed
from outrider.training.data.prompts import Prompt
from outrider.training.data.sampled_prompts import sampled_prompts, turns_file
from outrider.training.errors import PromptError, ServerError
from outrider.training.progress import Progress
from tests.training.data.scripted_server import completion, scripted_server

TOKENIZER = Tokenizer.load(str(Path(__file__).parents[3] / "models" / "demo-target"))
TURNS = (" How?\n", "How?", "Why?", "no end", "  ")


def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    if path == "/tokenize":
        return 200, {}, {"tokens": chat_token_ids(parse_body(TokenizeChatRequest, body), TOKENIZER)}
    assert path == "/v1/completions"
    turn = TURNS[[sample_seed(0, sample) for sample in range(len(TURNS))].index(body["seed"])]
    reply = completion(turn, token_ids=[1], prompt_token_ids=[2])
    reply["choices"][0]["finish_reason"] = "length" if turn == "no end" else "stop"
    return 200, {}, reply


async def sample(url: str, output: Path, num_prompts: int) -> list[Prompt]:
    config = PrepareConfig(base_url=url, model="m", output=output, max_retries=0)
    return await sampled_prompts(config, num_prompts, Progress(Console(quiet=True), "turns"))


async def test_turns_are_sampled_behind_the_user_header(tmp_path: Path) -> None:
    output = tmp_path / "data.jsonl"
    with scripted_server(answer) as server:
        prompts = await sample(server.url, output, 2)
        more = await sample(server.url, output, 5)
    assert [prompt.messages for prompt in prompts] == [({"role": "user", "content": "How?"},)]
    # The end of a turn is not part of it; what has no end, or says nothing, is no turn.
    assert {prompt.messages[0]["content"] for prompt in more if prompt.messages} == {"How?", "Why?"}
    asked = [body for path, body, _ in server.requests if path == "/v1/completions"]
    wanted = sorted(sample_seed(0, sample) for sample in range(5))
    assert sorted(body["seed"] for body in asked) == wanted  # the second run samples only what is missing
    assert {TOKENIZER.decode(body["prompt"], skip_special_tokens=False) for body in asked} == {"<|user|>\n"}
    assert turns_file(output).name == "data.turns.jsonl"
    assert not output.exists()


async def test_models_and_servers_that_have_no_user_turns(tmp_path: Path) -> None:
    cases: list[tuple[Any, type[Exception], str]] = [
        ((404, {}, "no such route"), ServerError, "does not tokenize a chat .*; give --prompts"),
        ((200, {}, {"tokens": None}), ServerError, "does not tokenize a chat .*; give --prompts"),
        ((200, {}, {"tokens": [1, 2]}), PromptError, "has no user header; give --prompts"),
    ]
    for reply, error, words in cases:
        with scripted_server(lambda _path, _body, reply=reply: reply) as server, pytest.raises(error, match=words):
            await sample(server.url, tmp_path / "data.jsonl", 1)


async def test_a_model_whose_turns_never_end(tmp_path: Path) -> None:
    def endless(path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        return answer(path, body | {"seed": sample_seed(0, 3)})

    with scripted_server(endless) as server, pytest.raises(PromptError, match="no sampled turn ends; give --prompts"):
        await sample(server.url, tmp_path / "data.jsonl", 2)


def test_sampled_and_given_prompts_exclude_each_other(tmp_path: Path) -> None:
    given = ["--sample-prompts", "--prompts", str(tmp_path / "p.txt"), "--output", str(tmp_path / "data.jsonl")]
    done = CliRunner().invoke(app, ["prepare-data", *given])
    assert done.exit_code == 2
    assert "--sample-prompts makes the prompts that --prompts names" in done.output
