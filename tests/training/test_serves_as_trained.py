"""Drafts in service are the drafts that training measured: the demo heads, through the whole stack, token by token.

Oracle: the head's objective, run over the text that the stack wrote, gives each position's guesses; walking that text
as a verifier does (accept, step over, start again) foretells how many drafts are accepted in every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from models.make.agreement import load_for_measuring
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.processes import Stack
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.block import BlockObjective
from outrider.training.heads.interface import Batch, Objective
from outrider.training.heads.unroll import unroll
from tests.ports import server_port

pytestmark = pytest.mark.storm

MODELS = Path(__file__).parents[2] / "models"
METHODS = ("eagle3", "dspark", "eagle", "medusa", "mlp_speculator")
HEADS = {name: path for name in METHODS if (path := MODELS / f"demo-{name.replace('_', '-')}").is_dir()}
DRAFT_LEN, NUM_TOKENS = 4, 96
PROMPTS = (
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):",
    "def add(a, b):\n    return a + b\n\n\ndef sub(",
    '"""Utilities for reading and writing files.\n\nThis module provides',
    "<|user|>\nWrite a function `read` that returns the lines of a file<|end|>\n<|assistant|>\n",
    "from typing import Any\n\nimport numpy as np\n\n\ndef mean(values):",
    "for name in names:\n    print(name)\nwhile True:",
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = StackSettings(
        model=str(MODELS / "demo-target"),
        draft_model=",".join(map(str, HEADS.values())),
        port=0,
        grpc_port=server_port(),
    )
    stack = Stack(settings, tmp_path_factory.mktemp("stack"), lambda _message: None)
    state = stack.start()
    try:
        yield f"{state.url}/v1"
    finally:
        stack.stop()


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(MODELS / "demo-target", torch.float32)


def greedy_text(url: str, method: str) -> tuple[list[dict[str, Any]], Counter[int]]:
    """The answers' choices, and how many steps had how many drafts accepted."""
    choices, steps = [], Counter[int]()
    for prompt in PROMPTS:
        drafts = {"num_speculative_tokens": DRAFT_LEN, "token_tree": False} if method != "off" else {}
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        whole = {**body, "return_token_ids": True, "speculation": {"method": method, **drafts}}
        reply = httpx.post(f"{url}/completions", json=whole, timeout=120).raise_for_status().json()
        choices.append(reply["choices"][0])
        steps.update(dict(enumerate(reply["metrics"]["speculative_decoding"]["acceptance_histogram"])))
    return choices, steps


@torch.no_grad()
def guesses(objective: Objective, target: FrozenTarget, token_ids: list[int]) -> list[list[int]]:
    """guesses[depth][t]: the draft for token t + 2 + depth from the state of position t, all before it being right."""
    rows = torch.tensor([token_ids])
    features = target.view(rows, objective.feature_layers).features
    head: Any = objective.head
    if objective_is(objective, "Medusa"):
        return head(features[0, :-2]).argmax(-1).T.tolist()
    if objective_is(objective, "MlpSpeculator"):
        state, found = head.start(features[0, :-2]), []
        for depth in range(DRAFT_LEN):
            tokens = torch.nn.functional.pad(rows[0, 1 + depth :], (0, depth))[: len(token_ids) - 2]
            state, logits = head.step(state, tokens, depth)
            found.append(logits.argmax(-1).tolist())
        return found
    if isinstance(objective, BlockObjective):
        anchors = torch.arange(1, len(token_ids) - 1)[None]
        view = target.view(rows, objective.feature_layers)
        outputs = objective._outputs(Batch(rows, torch.ones_like(rows, dtype=torch.bool)), view, anchors)[0]
        padded, found, state = torch.nn.functional.pad(rows[0], (0, DRAFT_LEN)), [], None
        for depth in range(DRAFT_LEN):
            row = outputs[:, depth + head.config.num_silent_rows]
            logits, state = head.biased(head.lm_head(row), row, padded[anchors[0] + depth], state)
            found.append(logits.argmax(-1).tolist())
        return found
    steps = unroll(head, rows, head.fuse(features), DRAFT_LEN)
    picked = [head.logits(feature)[0].argmax(-1) for feature in steps]
    return [(ids if head.target_ids is None else head.target_ids[ids]).tolist() for ids in picked]


def objective_is(objective: Objective, name: str) -> bool:
    return type(objective).__name__ == f"{name}Objective"


def walk(token_ids: list[int], num_prompt: int, drafted: list[list[int]]) -> Counter[int]:
    """Accepted drafts per step: a step stands on the last token before its own, the target adds one to each."""
    steps, position = Counter[int](), num_prompt - 1
    while position + 2 < len(token_ids):
        num_accepted = 0
        while (
            num_accepted < DRAFT_LEN
            and position + 2 + num_accepted < len(token_ids)
            and drafted[num_accepted][position] == token_ids[position + 2 + num_accepted]
        ):
            num_accepted += 1
        steps[num_accepted] += 1
        position += num_accepted + 1
    return steps


def mean_count(histogram: Counter[int]) -> float:
    return sum(count * steps for count, steps in histogram.items()) / sum(histogram.values())


def test_a_head_ships_to_be_tested() -> None:
    assert HEADS


@pytest.mark.parametrize("method", METHODS)
def test_every_step_accepts_what_was_foretold(url: str, target: FrozenTarget, method: str) -> None:
    if method not in HEADS:
        pytest.skip(f"no trained {method} ships with the demo target")
    objective = load_for_measuring(HEADS[method], target)
    choices, served = greedy_text(url, method)
    foretold: Counter[int] = Counter()
    for choice in choices:
        ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
        assert len(choice["token_ids"]) == NUM_TOKENS
        foretold += walk(ids, len(choice["prompt_token_ids"]), guesses(objective, target, ids))
    num_steps = sum(foretold.values())
    assert num_steps > 100
    # The stack computes in bfloat16, the oracle in float32: near ties may fall otherwise, and where one does, the steps
    # after it begin elsewhere.
    told = f"foretold {sorted(foretold.items())}, served {sorted(served.items())}"
    assert sum(abs(foretold[count] - served[count]) for count in range(DRAFT_LEN + 1)) <= 0.2 * num_steps, told
    assert mean_count(served) == pytest.approx(mean_count(foretold), rel=0.06), told


def test_texts_are_those_without_drafts(url: str) -> None:
    def token_ids(method: str) -> list[list[int]]:
        return [choice["token_ids"] for choice in greedy_text(url, method)[0]]

    plain = token_ids("off")
    for method in HEADS:
        assert token_ids(method) == plain, method
