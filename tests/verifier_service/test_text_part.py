"""The text part of a multimodal model decodes the same bytes with drafts and without, in one batch of sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.shared.messages import LocalDrafts, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from tests.engine.model.multimodal_models import save_multimodal
from tests.verifier_service.served_target import decode, digest, served


def spec_of(key: int, params: SamplingParams, salt: str) -> SessionSpec:
    prompt = tuple(3 + place * key % 7 for place in range(11 + 5 * key))
    return SessionSpec(f"s{key}", 0, prompt, (), params, SpeculationMode.EXACT, stream_key=key, cache_salt=salt)


@pytest.mark.parametrize("name", ["kimi_k25", "qwen3_vl"])
def test_no_byte_changes(name: str, tmp_path: Path) -> None:
    with served(save_multimodal(name, tmp_path), ("ngram",)).engine() as engine:
        for params in (SamplingParams(temperature=0.0, max_tokens=24), SamplingParams(temperature=0.5, seed=1)):
            plain = decode(engine, [spec_of(key, params, "plain") for key in (1, 2, 3)], None)
            specs = [spec_of(key, params, "drafted") for key in (1, 2, 3)]
            drafted = decode(engine, specs, LocalDrafts("ngram", 4, False))
            assert digest(drafted) == digest(plain)
            assert sum(outcome.num_draft_tokens for outcome in drafted) > 0
