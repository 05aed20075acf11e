"""An arm of a benchmark that compares heads: a fresh stack, asked with prompts that are lines of JSON.

A prompt has "prompt" or "messages".
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.screen import console, say
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.local_models import with_folders
from outrider.client.stack.processes import Stack, free_port

# seconds; one answer on a slow CPU
_TIMEOUT_S = 600.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `ask` reads."""
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--num-speculative-tokens", type=int, default=3)


@contextmanager
def arm_stack(model: str, draft_model: str, verifier_args: tuple[str, ...] = ()) -> Iterator[httpx.Client]:
    """A client of a stack whose verifier drafts."""
    settings = StackSettings(
        model, draft_model, port=free_port(), grpc_port=free_port(), num_drafters=0, verifier_args=verifier_args
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack(with_folders(settings, say), Path(folder), lambda _: None, in_foreground=True) as state,
        httpx.Client(base_url=state.url, timeout=_TIMEOUT_S) as client,
    ):
        yield client


def ask(
    client: httpx.Client, prompt: Mapping[str, Any], arguments: argparse.Namespace, **fields: object
) -> dict[str, Any]:
    """The whole answer. fields: of the request, besides the prompt and what the options say."""
    speculation = {"method": arguments.method, "num_speculative_tokens": arguments.num_speculative_tokens}
    body = {**prompt, "max_tokens": arguments.max_tokens, "speculation": speculation, **fields}
    path = "/v1/chat/completions" if "messages" in prompt else "/v1/completions"
    answer: dict[str, Any] = client.post(path, json=body).raise_for_status().json()
    return answer


def text_of(answer: Mapping[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def say_whether_same(same: bool) -> None:
    console.print(f"the arms' answers are the same bytes: {'yes' if same else 'NO'}")
