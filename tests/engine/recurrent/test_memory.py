"""How the memory of --kv-cache-mb is divided."""

from __future__ import annotations

import pytest

from outrider.engine.recurrent.memory import describe_slots, gpu_cache_bytes, plan_memory
from outrider.shared.errors import ConfigError

MB = 2**20


def test_a_model_without_recurrent_layers_has_blocks_alone() -> None:
    assert plan_memory(512 * MB, MB, 0, 64).num_blocks == 512
    assert plan_memory(1, MB, 0, 64).num_blocks == 1


@pytest.mark.parametrize("budget_mb", [121, 200, 512, 4096, 100_000])
@pytest.mark.parametrize("max_num_seqs", [1, 16, 64])
def test_slots_and_blocks_fit_the_budget(budget_mb: int, max_num_seqs: int) -> None:
    plan = plan_memory(budget_mb * MB, MB, 60 * MB, max_num_seqs)
    assert plan.num_slots >= 2
    assert plan.num_blocks >= 1
    assert plan.num_slots * 60 + plan.num_blocks <= budget_mb
    assert budget_mb - plan.num_slots * 60 - plan.num_blocks < 1, "nothing is left over"
    assert plan.num_slots <= 3 * max_num_seqs


def test_what_cannot_run_a_session_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="--kv-cache-mb 120: one session needs 2 recurrent states and a KV block, 121"
    ):
        plan_memory(120 * MB, MB, 60 * MB, 1)


def test_the_setting_of_a_verifiers_own_drafts_is_named() -> None:
    with pytest.raises(ConfigError, match="--local-kv-cache-mb 120: one session") as refused:
        plan_memory(120 * MB, MB, 60 * MB, 1, "--local-kv-cache-mb")
    assert refused.value.param == "local_kv_cache_mb"
    plan = plan_memory(130 * MB, MB, 60 * MB, 4, "--local-kv-cache-mb")
    assert "--local-kv-cache-mb 960 is enough" in describe_slots(plan, 60 * MB, 4, "--local-kv-cache-mb")


@pytest.mark.parametrize("max_num_seqs", [1, 7, 64])
def test_the_log_says_how_much_would_be_enough(max_num_seqs: int) -> None:
    plan = plan_memory(130 * MB, MB, 60 * MB, max_num_seqs)
    said = describe_slots(plan, 60 * MB, max_num_seqs)
    assert "2 recurrent states of 60.0 MiB" in said
    assert ("preempted" in said) == (max_num_seqs > 1)
    if max_num_seqs > 1:
        enough_mb = int(said.split("--kv-cache-mb ")[1].split()[0])
        assert plan_memory(enough_mb * MB, MB, 60 * MB, max_num_seqs).num_slots >= 2 * max_num_seqs
        assert plan_memory((enough_mb - 1) * MB, MB, 60 * MB, max_num_seqs).num_slots < 2 * max_num_seqs


def test_a_cache_takes_what_a_share_of_the_gpu_leaves() -> None:
    gib = 1 << 30
    assert gpu_cache_bytes(0.5, 80 * gib, 64 * gib, drafting=3 * gib) == (40 - 16 - 3 - 1) * gib
    with pytest.raises(ConfigError, match="nothing is left") as refused:
        gpu_cache_bytes(0.85, 24 * gib, 4 * gib)
    assert refused.value.param == "gpu_memory_utilization"
