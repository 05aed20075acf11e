"""LLM with method mtp: a drafter that reads the target's own files, and hidden states in messages; no token changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.offline import LLM, SamplingParams
from outrider.offline.speculation import plan_speculation
from outrider.shared.errors import ConfigError
from tests.drafting.assistants import save_pair
from tests.drafting.mtp_targets import save_mtp_target

DEMO = Path(__file__).parents[2] / "models" / "demo-target"
PROMPTS = ["def fibonacci(n):", "import os\nimport sys\n", "for i in"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=7)
TREES = replace(SEEDED, extra_args={"speculation": {"token_tree": True}})


def tokens(folder: Path, requests: list[SamplingParams], speculative_config: dict[str, Any] | None) -> list[Any]:
    """Of all prompts for each request, and the drafted tokens of all."""
    arguments: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "kv_cache_mb": 16}
    with LLM(folder, speculative_config=speculative_config, **arguments) as llm:
        outputs = [llm.generate(PROMPTS, params, use_tqdm=False) for params in requests]
    figures = [output.metrics.speculative_decoding for each in outputs for output in each]
    num_drafted = sum(shown["num_draft_tokens"] for shown in figures if shown is not None)
    return [[output.outputs[0].token_ids for output in each] for each in outputs] + [num_drafted]


@pytest.mark.parametrize(
    "family", ["glm4_moe", *(pytest.param(name, marks=pytest.mark.storm) for name in ("nemotron_h", "glm_ocr"))]
)
def test_the_tokens_are_those_without_drafts(tmp_path: Path, family: str) -> None:
    target = save_mtp_target(family, tmp_path / "target", tokenizer=DEMO, vocab_size=4096)
    greedy, seeded, none = tokens(target.folder, [GREEDY, SEEDED], None)
    config = {"method": f"{family}_mtp", "num_speculative_tokens": 3}
    assert none == 0
    *found, num_drafted = tokens(target.folder, [GREEDY, SEEDED, TREES], config)
    assert found == [greedy, seeded, seeded]
    assert num_drafted > 3 * len(PROMPTS) * 24


def test_the_tokens_with_gemma_4s_assistant_are_those_without(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, num_centroids=64, num_kv_shared_layers=3, vocab_size=4096, tokenizer=DEMO)
    greedy, seeded, none = tokens(pair.target, [GREEDY, SEEDED], None)
    assert none == 0
    config = {"model": str(pair.assistant), "num_speculative_tokens": 3}
    assert plan_speculation(config, str(pair.target)).methods == ("mtp", "suffix", "ngram")
    *found, num_drafted = tokens(pair.target, [GREEDY, SEEDED, TREES], {"method": "mtp", **config})
    assert found == [greedy, seeded, seeded]
    assert num_drafted > 3 * len(PROMPTS) * 24


def test_a_target_without_mtp_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="method mtp needs a target with MTP layers"):
        LLM(DEMO, speculative_config={"method": "mtp", "num_speculative_tokens": 3}, num_threads=1)
