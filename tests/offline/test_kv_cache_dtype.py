"""With a KV cache in 8 bits the bytes are those without drafts, whoever drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.offline import LLM, SamplingParams

MODELS = Path(__file__).parents[2] / "models"
PROMPTS = ["def add(a, b):\n    return a + b\n\n\ndef sub(", "import os\nimport sys\n\n\nclass Reader:\n    def"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=7)
DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4},
    "draft_model": {"model": MODELS / "demo-draft", "num_speculative_tokens": 4, "method": "draft_model"},
}
TREES = replace(SEEDED, extra_args={"speculation": {"token_tree": True}})


def answers(kv_cache_dtype: str, draft: dict[str, Any] | None, **arguments: Any) -> tuple[list[list[list[int]]], int]:
    """Token ids of all requests and prompts, and the number of accepted draft tokens."""
    with LLM(
        MODELS / "demo-target",
        dtype="bfloat16",
        num_threads=1,
        kv_cache_mb=16,
        kv_cache_dtype=kv_cache_dtype,
        speculative_config=draft,
        **arguments,
    ) as llm:
        outputs = [llm.generate(PROMPTS, params, use_tqdm=False) for params in (GREEDY, SEEDED, TREES)]
    figures = [output.metrics.speculative_decoding for of_request in outputs for output in of_request]
    num_accepted = sum(shown["num_accepted_draft_tokens"] for shown in figures if shown is not None)
    return [[output.outputs[0].token_ids for output in of_request] for of_request in outputs], num_accepted


@pytest.mark.storm  # three processes' worth of loading each; the engine's own tests are usual ones
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_off_is_ngram_is_draft_model(kv_cache_dtype: str) -> None:
    expected, num_accepted = answers(kv_cache_dtype, None)
    assert num_accepted == 0
    assert expected[1] == expected[2] != expected[0]
    for method, draft in DRAFTS.items():
        found, num_accepted = answers(kv_cache_dtype, draft, max_num_batched_tokens=16)
        assert found == expected, method
        assert num_accepted > 0, method
