"""A hybrid draft model in the verifier: the bytes of plain decoding, and every draft of the target itself accepted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.shared.errors import ConfigError
from outrider.shared.messages import LocalDrafts, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from tests.engine.model.multimodal_models import save_multimodal
from tests.engine.tiny_models import HYBRIDS, save_tiny_model
from tests.verifier_service.engine_client import Session, save_llama, tokens_of
from tests.verifier_service.served_target import Served, decode, digest, served

NUM_TOKENS = 30
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True),
    "law": SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS, ignore_eos=True),
}
METHODS = ("draft_model",)


@pytest.fixture(scope="module")
def of_itself(checkpoint: Path) -> Served:
    return replace(served(checkpoint, METHODS), draft_model=(str(checkpoint),))


def spec_of(key: int, kind: str, salt: str = "") -> SessionSpec:
    prompt = tuple(3 + (key * 7 + place * place) % 50 for place in range(5 + 23 * key))
    mode = SpeculationMode.REJECTION if kind == "law" else SpeculationMode.EXACT
    return SessionSpec(f"s{key}", 0, prompt, (), PARAMS[kind], mode, stream_key=key, cache_salt=salt or f"{key}{kind}")


def check_bytes(target: Served) -> int:
    """Four sessions in one batch, chains and trees; returns the number of accepted tokens."""
    num_accepted = 0
    with target.engine() as engine:
        for kind in ("greedy", "seeded"):
            plain = decode(engine, [spec_of(key, kind) for key in range(4)], None)
            for length, tree in itertools.product((1, 4), (False, True)):
                specs = [spec_of(key, kind, salt=f"{length}{tree}") for key in range(4)]
                found = decode(engine, specs, LocalDrafts("draft_model", length, tree))
                assert digest(found) == digest(plain), (kind, length, tree)
                assert min(outcome.num_draft_tokens for outcome in found) > 0
                num_accepted += sum(outcome.num_accepted for outcome in found)
    return num_accepted


def test_no_byte_changes(of_itself: Served) -> None:
    assert check_bytes(of_itself) > 0


@pytest.mark.storm
def test_an_attention_model_drafts_for_a_hybrid_and_the_other_way_round(checkpoint: Path, tmp_path: Path) -> None:
    llama = save_llama(tmp_path / "llama")
    for target, draft in ((llama, checkpoint), (checkpoint, llama)):
        check_bytes(replace(served(target, METHODS), draft_model=(str(draft),)))


@pytest.mark.parametrize("kind", ["greedy", "seeded", "law"])
def test_every_draft_of_the_target_itself_is_accepted(of_itself: Served, kind: str) -> None:
    """Which it would not be after one state wound back wrongly, or a row of one replayed twice."""
    with of_itself.engine() as engine:
        specs = [spec_of(key, kind) for key in range(3)]
        plain = decode(engine, specs, None)
        for outcome, expected in zip(decode(engine, specs, LocalDrafts("draft_model", 4)), plain, strict=True):
            if kind != "law":
                assert outcome.token_ids == expected.token_ids
                assert outcome.num_accepted == outcome.num_draft_tokens >= NUM_TOKENS / 2
            else:
                assert outcome.num_accepted > NUM_TOKENS / 4


def test_a_lost_reply_and_a_changing_length(of_itself: Served) -> None:
    """Rounds of every length whose commits are taken back as a whole, or in part, and drafted again."""
    spec = spec_of(1, "greedy")
    with of_itself.engine() as engine:
        (plain,) = decode(engine, [spec_of(1, "greedy", "plain")], None)
        num_accepted, seen = 0, ()
        with Session(engine, spec) as session:
            for length, back in itertools.cycle([(4, 0), (1, 1), (3, 5), (2, 2), (4, 4), (4, 0)]):
                seen = seen[: max(1, len(seen) - back)] if seen else seen
                commits = session.step(len(seen), max_new_tokens=6, local=LocalDrafts("draft_model", length))
                seen += tokens_of(commits)
                num_accepted += sum(commit.num_accepted_tokens for commit in commits)
                assert seen == plain.token_ids[: len(seen)]
                if commits[-1].finish_reason is not None:
                    break
        assert num_accepted > NUM_TOKENS / 2


def test_too_little_memory_is_said_and_costs_no_byte(of_itself: Served, tmp_path: Path) -> None:
    """States of 2.4 MiB: two of them in 8 MiB, for four sessions."""
    config_name, settings = HYBRIDS["qwen3_5"]
    wide = settings | {"linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 48}
    folder = save_tiny_model(config_name, wide | {"vocab_size": 61, "max_position_embeddings": 256}, tmp_path)
    small = replace(served(folder, METHODS), draft_model=(str(folder),), local_kv_cache_mb=8)
    assert check_bytes_of_some(small) > 0
    refusal = "--local-kv-cache-mb 2: one session needs 2 recurrent states"
    with pytest.raises(ConfigError, match=refusal), replace(small, local_kv_cache_mb=2).engine():
        pass


def check_bytes_of_some(target: Served) -> int:
    with target.engine() as engine:
        plain = decode(engine, [spec_of(key, "greedy") for key in range(4)], None)
        found = decode(engine, [spec_of(key, "greedy", "drafted") for key in range(4)], LocalDrafts("draft_model", 3))
        assert digest(found) == digest(plain)
        return sum(outcome.num_accepted for outcome in found)


def test_the_text_part_of_a_multimodal_checkpoint_drafts(tmp_path: Path) -> None:
    folder = save_multimodal("qwen3_5", tmp_path)
    target = replace(served(folder, METHODS), draft_model=(str(folder),))
    with target.engine() as engine:
        prompt = tuple(range(3, 20))
        params = replace(PARAMS["greedy"], max_tokens=20)
        spec = replace(spec_of(0, "greedy"), prompt_token_ids=prompt, sampling_params=params)
        (plain,) = decode(engine, [spec], None)
        (found,) = decode(engine, [spec], LocalDrafts("draft_model", 4))
    assert found.token_ids == plain.token_ids
    assert found.num_accepted == found.num_draft_tokens > 10
