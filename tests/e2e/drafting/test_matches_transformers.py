"""Temperature 0 through REST is transformers' greedy `generate`, token for token, whoever drafts.

The oracle runs alone, in float32 with eager attention, on the weights that the float32 stack serves. Two logits that
lie closer than float32 can tell are nobody's error; such a place is named in the failure, with the gap, never skipped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch
from e2e_rest import complete, complete_all, speculation
from e2e_stack import DEMO_TARGET
from transformers import AutoModelForCausalLM, GenerationConfig

pytestmark = pytest.mark.storm

NUM_TOKENS = 128
NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Oracle:
    """`gaps[i]`: how far the logit of output token i is ahead of the second best."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]


@pytest.fixture(scope="module")
def oracles(prompts: list[tuple[int, ...]]) -> list[Oracle]:
    """Prompts of one length go through `generate` together: without padding the mask is all ones."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32, attn_implementation="eager")
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    found: dict[int, Oracle] = {}
    num_threads = torch.get_num_threads()
    # A second thread next to a busy core costs ten times what it brings (100 s instead of 12 s for all prompts).
    torch.set_num_threads(1)
    for indices in by_length.values():
        answers = _generate(model, [prompts[index] for index in indices])
        found.update(zip(indices, answers, strict=True))
    torch.set_num_threads(num_threads)
    return [found[index] for index in range(len(prompts))]


@torch.inference_mode()
def _generate(model: Any, prompts: Sequence[tuple[int, ...]]) -> list[Oracle]:
    token_ids = torch.tensor(prompts)
    # eos_token_id None: every output has its full length; where it would have ended is another test's matter.
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    result = model.generate(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), generation_config=settings)
    best = torch.stack(result.logits).topk(2, dim=-1).values
    gaps = (best[..., 0] - best[..., 1]).T.tolist()
    outputs = result.sequences[:, token_ids.shape[1] :].tolist()
    return [Oracle(tuple(output), tuple(row)) for output, row in zip(outputs, gaps, strict=True)]


def _body(prompt: tuple[int, ...], **fields: object) -> dict[str, object]:
    return {"prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}


def _difference(index: int, oracle: Oracle, token_ids: tuple[int, ...]) -> str:
    pairs = enumerate(zip(oracle.token_ids, token_ids, strict=True))
    place = next(place for place, (expected, actual) in pairs if expected != actual)
    gap = oracle.gaps[place]
    kind = "a near-tie of the oracle" if gap < NEAR_TIE else "no near-tie"
    return (
        f"prompt {index}: token {place} is {token_ids[place]}, the oracle has {oracle.token_ids[place]}, "
        f"{gap:.2e} ahead of its second: {kind}"
    )


@pytest.mark.parametrize("method", ["off", "ngram", "draft_model"])
async def test_greedy_output_is_that_of_generate(
    method: str, float32_http: httpx.AsyncClient, prompts: list[tuple[int, ...]], oracles: list[Oracle]
) -> None:
    length = None if method == "off" else 5
    answers = await complete_all(float32_http, [_body(prompt, **speculation(method, length)) for prompt in prompts])
    differences = [
        _difference(index, oracle, answer.token_ids)
        for index, (oracle, answer) in enumerate(zip(oracles, answers, strict=True))
        if answer.token_ids != oracle.token_ids
    ]
    assert not differences, "\n".join(differences)
    drafted = sum(answer.speculation["num_draft_tokens"] for answer in answers)
    assert (drafted > 0) == (method != "off")


@pytest.mark.parametrize("method", ["off", "draft_model"])
async def test_a_stop_token_ends_the_output_where_generate_would(
    method: str, float32_http: httpx.AsyncClient, prompts: list[tuple[int, ...]], oracles: list[Oracle]
) -> None:
    output = oracles[4].token_ids
    # The last new token of the output: as far in as this output allows.
    place = max(output.index(token_id) for token_id in set(output))
    body = _body(prompts[4], stop_token_ids=[output[place]], **speculation(method))
    answer = await complete(float32_http, body)
    assert answer.token_ids == output[: place + 1]
    assert answer.finish_reason == "stop"
