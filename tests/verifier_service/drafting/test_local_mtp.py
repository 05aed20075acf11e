"""Method mtp in a verifier: one hash per request whoever drafts, accepted drafts, cached prefixes, shared matrices."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from outrider.drafting.methods.registry import build_methods
from outrider.drafting.settings import MethodSettings
from outrider.shared.errors import ConfigError
from outrider.shared.messages import LocalDrafts, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from tests.drafting.agreeing_mtp import agreeing
from tests.drafting.mtp_targets import FAMILIES, save_mtp_target
from tests.verifier_service.engine_client import save_llama
from tests.verifier_service.served_target import Served, decode, digest, served

NUM_TOKENS = 32
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True),
    "law": SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS, ignore_eos=True),
}
LENGTHS = (1, 3, 5)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return served(save_mtp_target("glm4_moe", tmp_path_factory.mktemp("glm") / "target").folder)


def spec_of(key: int, kind: str, *, salt: str = "") -> SessionSpec:
    prompt = tuple(3 + (key * 7 + place * place) % 58 for place in range(5 + 9 * key))
    mode = SpeculationMode.REJECTION if kind == "law" else SpeculationMode.EXACT
    return SessionSpec(f"s{key}", 0, prompt, (), PARAMS[kind], mode, stream_key=key, cache_salt=salt or f"{key}{kind}")


def check_grid(served: Served) -> None:
    """Greedy and seeded, chain and tree, each length, four sessions in one batch: the bytes of plain decoding."""
    with served.engine() as engine:
        num_accepted = 0
        for kind in ("greedy", "seeded"):
            plain = decode(engine, [spec_of(key, kind) for key in range(4)], None)
            for length, tree in itertools.product(LENGTHS, (False, True)):
                specs = [spec_of(key, kind, salt=f"{length}{tree}") for key in range(4)]
                found = decode(engine, specs, LocalDrafts("mtp", length, tree))
                assert digest(found) == digest(plain), (kind, length, tree)
                assert min(outcome.num_draft_tokens for outcome in found) >= NUM_TOKENS / 2
                num_accepted += sum(outcome.num_accepted for outcome in found)
    assert num_accepted > 0


def test_no_byte_changes_with_mtp(glm: Served) -> None:
    check_grid(glm)


@pytest.mark.storm
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "glm4_moe"])
def test_no_byte_changes_with_mtp_in_any_family(family: str, tmp_path: Path) -> None:
    check_grid(served(save_mtp_target(family, tmp_path / "target").folder))


def test_a_cached_prefix_is_hit_and_drafted_from(glm: Served) -> None:
    """With its hidden states, and left there by a session that needed none."""
    local = LocalDrafts("mtp", 3)
    with glm.engine() as engine:
        for first in (local, None):
            specs = [spec_of(3, "greedy", salt=f"turns {first}") for _turn in range(2)]
            (before,) = decode(engine, specs[:1], first)
            (after,) = decode(engine, specs[1:], local)
            assert after.token_ids == before.token_ids
            assert after.num_cached_tokens >= 28
            assert after.num_draft_tokens > NUM_TOKENS / 2


# ---- a layer that is always right ----


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5"])
def test_a_layer_that_is_always_right_is_always_accepted(family: str, tmp_path: Path) -> None:
    target = save_mtp_target(family, tmp_path / "random")
    with served(agreeing(target, tmp_path / "predictable", 0.0)).engine() as engine:
        for kind in ("greedy", "seeded", "law"):
            (plain,) = decode(engine, [spec_of(1, kind)], None)
            (found,) = decode(engine, [spec_of(1, kind, salt="drafted")], LocalDrafts("mtp", 3))
            assert found.num_accepted == found.num_draft_tokens > NUM_TOKENS / 2
            if kind != "law":
                assert found.token_ids == plain.token_ids


# ---- what it is built from ----


def test_the_loaded_targets_matrices_are_shared(glm: Served) -> None:
    settings = MethodSettings(target_model=glm.loaded.path, methods=("mtp",), dtype="float32", num_threads=1)
    for loaded in (glm.loaded, None):
        head = build_methods(settings, lambda _message: None, loaded)["mtp"]._net._paged.head  # type: ignore[attr-defined]
        assert (head.embed_tokens is glm.loaded.model.get_input_embeddings()) == (loaded is not None)
        assert (head.lm_head is glm.loaded.model.get_output_embeddings()) == (loaded is not None)


def test_a_target_without_mtp_layers_is_refused(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "llama")
    settings = MethodSettings(target_model=str(folder), methods=("mtp",))
    with pytest.raises(ConfigError, match=r"--methods: .* none are read of model type llama"):
        build_methods(settings, lambda _message: None)
