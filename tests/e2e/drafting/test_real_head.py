"""The EAGLE-3 head for SmolLM2 135M, which `make demo` serves: the same bytes as without it, in fewer rounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_real_models import served, smollm_file

pytestmark = [pytest.mark.storm, pytest.mark.timeout(3600)]

HEAD = Path("models/smollm2-eagle3")
NUM_DRAFT_TOKENS = 5
QUESTIONS = (
    "What should I look for when I buy a used bicycle?",
    "Explain to a child why the sea is salty.",
    "Write a short note that thanks a neighbour for watering my plants.",
)
# tokens a round, the target's own included; half of what lies between none right and what docs/models.md says
FEWEST_TOKENS_PER_ROUND = 1.4


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    config = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": NUM_DRAFT_TOKENS}
    folder = tmp_path_factory.mktemp("head")
    with served(smollm_file(), folder, "--speculative-config", json.dumps(config)) as client:
        yield client


def answer(http: httpx.Client, question: str, law: dict[str, Any], speculation: dict[str, Any]) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 96,
        "return_token_ids": True,
        **law,
        "speculation": speculation | {"annotate": True},
    }
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


@pytest.mark.parametrize("law", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
def test_the_head_changes_no_byte_and_saves_rounds(http: httpx.Client, law: dict[str, Any]) -> None:
    num_tokens = num_rounds = 0
    for question in QUESTIONS:
        plain = answer(http, question, law, {"method": "off"})
        for speculation in ({"method": "eagle3"}, {"method": "eagle3", "token_tree": True}, {"method": "auto"}):
            drafted = answer(http, question, law, speculation)
            assert drafted["token_ids"] == plain["token_ids"], speculation
            assert drafted["message"] == plain["message"], speculation
            if speculation == {"method": "eagle3"}:
                num_tokens += len(drafted["token_ids"])
                num_rounds += len(drafted["outrider"]["rounds"])
    if law["temperature"] == 0:
        assert num_tokens / num_rounds > FEWEST_TOKENS_PER_ROUND, f"{num_tokens} tokens in {num_rounds} rounds"
