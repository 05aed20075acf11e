"""The demo family's hybrid: its bytes are those without drafts, whoever drafts and in whatever company, and its trained
MTP layer and EAGLE-3 head foresee them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.offline import LLM, RequestOutput, SamplingParams

MODELS = Path(__file__).parents[2] / "models"
HYBRID, HEAD = MODELS / "demo-hybrid", MODELS / "demo-hybrid-eagle3"
PROMPTS = [
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):",
    "def add(a, b):\n    return a + b\n\n\ndef sub(",
    "<|user|>\nWrite a function `read` that returns the lines of a file<|end|>\n<|assistant|>\n",
    "for i in",
]
METHODS = ("off", "ngram", "suffix", "mtp", "draft_model", "eagle3", "auto", "auto of eagle3")
USUAL_ALONE = ("off", "mtp")
USUAL_TOGETHER = METHODS[:-1]
# float32 is among the usual tests below, against transformers.
DTYPES = ("bfloat16", pytest.param("float32", marks=pytest.mark.storm))
# Alone; together in prompt chunks of 16, without cached prefixes.
COMPANIES: tuple[dict[str, Any], ...] = (
    {"max_num_seqs": 1},
    {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
)
NUM_TOKENS, DRAFT_LEN = 48, 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=7)
TREES = {"speculation": {"token_tree": True}}
REQUESTS = (GREEDY, SEEDED, replace(GREEDY, extra_args=TREES), replace(SEEDED, extra_args=TREES))


def pairs() -> list[Any]:
    """Most methods in company; alone, those that draft from tokens or choose are storms."""
    return [
        pytest.param(method, company, marks=() if method in usual else pytest.mark.storm)
        for company, usual in zip(COMPANIES, (USUAL_ALONE, USUAL_TOGETHER), strict=True)
        for method in METHODS
    ]


def answers(
    method: str, dtype: str, requests: Sequence[SamplingParams] | None = None, **arguments: Any
) -> list[list[RequestOutput]]:
    """Per request, of all prompts; by default all requests that the method has a part in.

    The draft model is the hybrid itself.
    """
    name, _, head = method.partition(" of ")
    config: dict[str, Any] | None = None
    if method != "off":
        config = {"method": name, "num_speculative_tokens": DRAFT_LEN}
        config |= {"model": str(HEAD)} if "eagle3" in (name, head) else {}
        config |= {"model": str(HYBRID)} if name == "draft_model" else {}
    with LLM(HYBRID, dtype=dtype, num_threads=1, kv_cache_mb=32, speculative_config=config, **arguments) as llm:
        if requests is None:
            requests = REQUESTS if name in ("mtp", "draft_model", "eagle3", "auto") else REQUESTS[:2]
        return [llm.generate(PROMPTS, params, use_tqdm=False) for params in requests]


def hashes(outputs: Sequence[Sequence[RequestOutput]]) -> tuple[str, str]:
    """Of the greedy and of the seeded token ids, each one for all requests of its kind."""
    found: list[set[str]] = [set(), set()]
    for number, of_request in enumerate(outputs):
        token_ids = [output.outputs[0].token_ids for output in of_request]
        found[number % 2].add(hashlib.sha256(json.dumps(token_ids).encode()).hexdigest())
    (greedy,), (seeded,) = found
    assert greedy != seeded
    return greedy, seeded


def drafted(outputs: Sequence[Sequence[RequestOutput]]) -> int:
    figures = [output.metrics.speculative_decoding for each in outputs for output in each]
    return sum(shown["num_draft_tokens"] for shown in figures if shown is not None)


@pytest.fixture(scope="module", params=DTYPES)
def plain(request: pytest.FixtureRequest) -> tuple[str, tuple[str, str]]:
    """(dtype, hashes without drafts), together and in whole prompts."""
    outputs = answers("off", request.param)
    assert drafted(outputs) == 0
    return request.param, hashes(outputs)


@pytest.mark.parametrize(("method", "company"), pairs(), ids=str)
def test_one_hash_for_all_methods_in_any_company(
    plain: tuple[str, tuple[str, str]], method: str, company: dict[str, Any]
) -> None:
    dtype, expected = plain
    outputs = answers(method, dtype, **company)
    assert hashes(outputs) == expected
    assert (drafted(outputs) > 0) == (method != "off")


def test_greedy_text_is_transformers() -> None:
    """In float32; two implementations of a recurrence may part at a near tie, and then go on elsewhere."""
    tokenizer = AutoTokenizer.from_pretrained(HYBRID)
    model = AutoModelForCausalLM.from_pretrained(HYBRID, dtype=torch.float32)
    (found,) = answers("mtp", "float32", [GREEDY])
    for prompt, output in zip(PROMPTS, found, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        text = torch.tensor([[*ids[0].tolist(), *output.outputs[0].token_ids]])
        with torch.inference_mode():
            laws = model(input_ids=text).logits[0, ids.shape[1] - 1 : -1]
        chosen = laws.gather(1, text[0, ids.shape[1] :, None])[:, 0]
        assert float((laws.max(-1).values - chosen).max()) < 1e-3


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=("greedy", "seeded"))
def test_every_draft_of_the_hybrid_itself_is_accepted(params: SamplingParams) -> None:
    """But for what max_tokens cuts off."""
    (outputs,) = answers("draft_model", "bfloat16", [params])
    for output in outputs:
        figures = output.metrics.speculative_decoding
        assert figures["num_accepted_draft_tokens"] == figures["num_draft_tokens"] >= NUM_TOKENS * 0.7


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_the_trained_foresee_what_the_model_card_says(method: str) -> None:
    """Other prompts than the card's, and fewer of them: within a fifth. An untrained layer is hardly ever right."""
    figures = json.loads((MODELS / "hybrid-evaluation.json").read_text())["tokens_per_round"]
    (outputs,) = answers(method, "bfloat16", [GREEDY])
    shown = [output.metrics.speculative_decoding for output in outputs]
    num_rounds = sum(each["num_spec_steps"] for each in shown)
    served = 1 + sum(each["num_accepted_draft_tokens"] for each in shown) / num_rounds
    assert served == pytest.approx(figures[method][str(DRAFT_LEN)], rel=0.2)
    assert served > 1 + 5 * (figures["mtp, untrained"][str(DRAFT_LEN)] - 1)
