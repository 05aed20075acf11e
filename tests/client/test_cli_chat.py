"""`outrider chat` against a real stack: one question, a pipe, a conversation in a terminal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from command import ROOT, Terminal, another_gateway, outrider

from outrider.client.stack.commands import StackState

QUESTION = "Write a function that returns the sum of two numbers."
# Its answer does not end: at 600 tokens/s a short one is over before Ctrl-C comes.
ENDLESS = "Write the numbers from 1 to 500, one per line."
ENDLESS_OPTIONS = ("--max-tokens", "1800", "--no-speculation")


def expected(stack: StackState, messages: list[dict[str, str]], max_tokens: int) -> str:
    """The oracle: the REST server, without speculation."""
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "speculation": {"method": "off"}}
    reply = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_one_question_and_no_speculation_say_the_same(stack: StackState) -> None:
    common = ("chat", QUESTION, "--max-tokens", "24", "--address", stack.grpc_address)
    speculated = outrider(*common, "--method", "ngram", "--num-speculative-tokens", "3")
    alone = outrider(*common, "--no-speculation")
    assert speculated.returncode == alone.returncode == 0, speculated.stderr + alone.stderr
    assert speculated.stdout == alone.stdout == expected(stack, [user(QUESTION)], 24) + "\n"
    assert "drafts" in speculated.stderr
    assert "drafts" not in alone.stderr
    assert "accepted draft" in alone.stderr  # the legend


def test_a_pipe_with_a_system_message_as_json(stack: StackState) -> None:
    done = outrider(
        *("chat", "--system", "Answer in Python.", "--max-tokens", "12", "--json", "--address", stack.grpc_address),
        stdin=QUESTION,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    messages = [{"role": "system", "content": "Answer in Python."}, user(QUESTION)]
    assert answer["text"] == expected(stack, messages, 12)
    assert (answer["finish_reason"], answer["completion_tokens"]) == ("length", 12)


def test_no_question_is_wrong_usage(stack: StackState) -> None:
    done = outrider("chat", "--address", stack.grpc_address, stdin=" \n")
    assert done.returncode == 2
    assert "no question" in done.stderr


def test_a_conversation(stack: StackState) -> None:
    first = expected(stack, [user("one")], 16)
    second = expected(stack, [user("one"), {"role": "assistant", "content": first}, user("two")], 16)
    fresh = expected(stack, [user("two")], 16)
    assert second != fresh, "the test could not tell whether the history was sent"
    with Terminal("chat", "--max-tokens", "16", "--address", stack.grpc_address) as terminal:
        terminal.read_until("> ")
        for line, answer in (("one", first), ("two", second)):
            terminal.type(f"{line}\n")
            assert _plain(answer) in _plain(terminal.read_until("tokens/s"))
            terminal.read_until("> ")
        terminal.type("/help\n")
        terminal.read_until("not a command")
        terminal.read_until("> ")
        terminal.type("/reset\n")
        terminal.read_until("> ")
        terminal.type("two\n")
        assert _plain(fresh) in _plain(terminal.read_until("tokens/s"))
        terminal.read_until("> ")
        terminal.type("/exit\n")
        assert terminal.exit_code() == 0


def test_the_endless_answer_goes_on_to_its_limit(stack: StackState) -> None:
    """What the two tests below need of the demo model."""
    done = outrider("chat", ENDLESS, *ENDLESS_OPTIONS, "--json", "--address", stack.grpc_address)
    assert json.loads(done.stdout)["completion_tokens"] == 1800, done.stderr


def test_ctrl_c_stops_the_answer_and_not_the_program(stack: StackState) -> None:
    with Terminal("chat", *ENDLESS_OPTIONS, "--address", stack.grpc_address) as terminal:
        terminal.read_until("> ")
        terminal.type(f"{ENDLESS}\n")
        terminal.read_until("def")
        terminal.type("\x03")
        terminal.read_until("stopped")
        terminal.read_until("> ")
        terminal.until_it_waits()
        terminal.type("\x03")  # at the prompt it only takes a new line
        terminal.read_until("> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0
        assert "Traceback" not in terminal.seen


def test_ctrl_c_ends_one_question_with_130(stack: StackState) -> None:
    with Terminal("chat", ENDLESS, *ENDLESS_OPTIONS, "--address", stack.grpc_address) as terminal:
        terminal.read_until("def")
        terminal.type("\x03")
        assert terminal.exit_code() == 130
        assert "Traceback" not in terminal.seen


@pytest.fixture
def templateless_gateway(stack: StackState, tmp_path: Path) -> Iterator[str]:
    """gRPC address of a gateway to the same fleet, whose copy of the target has no chat template."""
    folder = tmp_path / "demo-target"
    shutil.copytree(ROOT / "models" / "demo-target", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with another_gateway(stack, model=folder) as (_url, grpc_address):
        yield grpc_address


def test_a_model_without_a_chat_template(templateless_gateway: str) -> None:
    done = outrider("chat", QUESTION, "--address", templateless_gateway)
    assert done.returncode == 2
    assert "no chat template" in done.stderr
    assert done.stdout == ""


def _plain(text: str) -> str:
    """Without colours, and without white space, which a terminal changes."""
    without_codes = "".join(part.partition("m")[2] if place else part for place, part in enumerate(text.split("\x1b[")))
    return "".join(without_codes.split())
