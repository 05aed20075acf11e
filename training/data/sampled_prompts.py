"""User turns that a chat model writes itself, for prompts without a data set (Magpie, arXiv 2406.08464).

After the user header of its template an instruct model continues with a question like those that it was tuned on. The
header is what two rendered conversations share, so any server with vLLM's /tokenize works. Not here: the answers
(prepare_data.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from outrider.training.data.jsonl_file import JsonlFile
from outrider.training.data.prepare_data import PrepareConfig, prepare
from outrider.training.data.prompts import Prompt
from outrider.training.errors import PromptError, ServerError
from outrider.training.progress import Progress

# tokens; longest user turn that is kept; chosen, as a longer one is rarely a question
_MAX_TURN_TOKENS = 128
# temperature; chosen, as a small model's questions lose the subject at 1, and repeat at lower temperatures
_TURN_TEMPERATURE = 0.9


async def sampled_prompts(config: PrepareConfig, num_prompts: int, progress: Progress) -> list[Prompt]:
    """Samples `num_prompts` user turns from the server of `config`; returns the distinct ones that end.

    They are written next to the output (turns_file), so a second run continues there too. Raises ServerError, and
    PromptError when no turn ends.
    """
    path = turns_file(config.output)
    header = await _user_header(config)
    turns = replace(
        config, output=path, temperatures=(_TURN_TEMPERATURE,), num_samples=num_prompts, max_tokens=_MAX_TURN_TOKENS
    )
    await prepare([Prompt(token_ids=tuple(header))], turns, progress)
    with JsonlFile(path) as file:
        rows = file.rows
    texts = dict.fromkeys(_text(row) for row in rows)
    prompts = [Prompt(messages=({"role": "user", "content": text},)) for text in texts if text]
    progress.say(f"{path}: {len(prompts)} different prompts from {len(rows)} sampled turns")
    if not prompts:
        raise PromptError(f"{path}: no sampled turn ends; give --prompts, this seems to be no chat model")
    return prompts


def turns_file(output: Path) -> Path:
    """Returns the path of the turns: data.jsonl -> data.turns.jsonl"""
    return output.with_suffix(".turns.jsonl")


def _text(row: dict[str, Any]) -> str:
    return str(row["completion"]).strip() if row.get("finish_reason") == "stop" else ""


async def _user_header(config: PrepareConfig) -> list[int]:
    """Returns the token ids from the start of a conversation to its first user turn, the template's system prompt
    included."""
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    # /tokenize is not below /v1
    base_url = config.base_url.rstrip("/").removesuffix("/v1") + "/"
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=config.timeout_s) as http:
        ids = [await _tokens(http, config.model, text) for text in ("a", "b")]
    shared = next((i for i, pair in enumerate(zip(*ids, strict=False)) if pair[0] != pair[1]), 0)
    if not shared:
        raise PromptError("the model's chat template has no user header; give --prompts")
    return ids[0][:shared]


async def _tokens(http: httpx.AsyncClient, model: str, content: str) -> list[int]:
    body = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": False}
    try:
        reply = await http.post("tokenize", json=body | ({"model": model} if model else {}))
        return [int(token_id) for token_id in reply.raise_for_status().json()["tokens"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        cause = str(error).partition("\n")[0]  # httpx adds a link
        raise ServerError(f"{http.base_url}tokenize does not tokenize a chat ({cause}); give --prompts") from error
