"""The drafter's rounds for nobody: they meet the forwards that sessions need, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.drafter_service.config import DrafterConfig
from outrider.drafting.methods.draft_model import DraftModelNet, draft_model_method
from outrider.drafting.methods.registry import build_methods
from outrider.drafting.session import DraftSession
from outrider.drafting.warm_up import warm_up
from outrider.engine.attention.batch import ForwardBatch
from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.model.load import load_model
from outrider.engine.run.cpu_graphs import MEETINGS_BEFORE_RECORDING, ROW_BUCKETS
from outrider.engine.run.runner import ForwardResult, ModelRunner
from outrider.engine.sampling.coupling import compiled_race
from tests.drafting.drawn_cases import counted as counted_chains
from tests.kernels.triton_device import device
from tests.verifier_service.engine_client import save_llama

MODELS = Path(__file__).parents[2] / "models"
_HEADS = ("eagle", "eagle3", "dspark", "medusa", "mlp_speculator")


class _Watched(ModelRunner):
    """Counts the forwards by their rows, where every row's logits are wanted."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.num_rows: list[int] = []

    def forward(self, batch: ForwardBatch, tap_layers: tuple[int, ...] = ()) -> ForwardResult:  # type: ignore[override]
        if len(batch.logits_rows) == len(batch.token_ids):
            self.num_rows.append(len(batch.token_ids))
        return super().forward(batch, tap_layers)


def test_a_draft_models_forwards_are_met_and_nothing_stays(tmp_path: Path) -> None:
    loaded = load_model(str(save_llama(tmp_path, seed=5, num_layers=1)), dtype="float32")
    blocks = BlockManager(20, 4)
    runner = _Watched(loaded, loaded.make_cache(20, 4))
    method = draft_model_method(DraftModelNet(runner, blocks, prefill_chunk_size=32), "tiny")
    warm_up(method)
    blocks.check_integrity()
    assert blocks.num_free_blocks == 20
    # After a rejection one row is new, after none two.
    assert min(runner.num_rows.count(1), runner.num_rows.count(2)) >= MEETINGS_BEFORE_RECORDING


def test_forwards_of_every_recorded_size_are_met(tmp_path: Path) -> None:
    """With several sessions too: whoever meets a size first waits for its recording, and all of its batch with it."""
    loaded = load_model(str(save_llama(tmp_path, seed=5, num_layers=1)), dtype="float32")
    runner = _Watched(loaded, loaded.make_cache(2000, 4))
    method = draft_model_method(DraftModelNet(runner, BlockManager(2000, 4), prefill_chunk_size=32), "tiny")
    warm_up(method, budget_s=60.0)
    for size in ROW_BUCKETS:
        smaller = max((other for other in ROW_BUCKETS if other < size), default=0)
        assert sum(smaller < rows <= size for rows in runner.num_rows) >= MEETINGS_BEFORE_RECORDING, size


def test_no_session_waits_for_the_race_of_exact_mode_to_be_compiled(tmp_path: Path) -> None:
    loaded = load_model(str(save_llama(tmp_path, seed=5, num_layers=1)), dtype="float32")
    runner = _Watched(loaded, loaded.make_cache(400, 4))
    compiled_race.cache_clear()
    warm_up(draft_model_method(DraftModelNet(runner, BlockManager(400, 4), prefill_chunk_size=32), "tiny"))
    assert compiled_race.cache_info().currsize == 1


def test_a_slow_method_is_not_warmed_up_for_long(tmp_path: Path) -> None:
    loaded = load_model(str(save_llama(tmp_path, seed=5, num_layers=1)), dtype="float32")
    runner = _Watched(loaded, loaded.make_cache(400, 4))
    method = draft_model_method(DraftModelNet(runner, BlockManager(400, 4), prefill_chunk_size=32), "tiny")
    warm_up(method, budget_s=0.0)
    num_forwards = len(runner.num_rows)
    warm_up(method, budget_s=60.0)
    assert 0 < num_forwards < (len(runner.num_rows) - num_forwards) / 5, "one session alone, all of them"


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "cpu") for name in _HEADS),
        pytest.param("eagle3", "triton", marks=pytest.mark.storm),
        ("medusa", "triton"),
    ],
)
def test_heads_propose_with_no_targets_states(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the service builds them: on the triton kernels their chains are drawn on the device, on the CPU those of paged
    heads in recorded programs; else they grow."""
    folder, target = MODELS / f"demo-{name.replace('_', '-')}", MODELS / "demo-target"
    config = DrafterConfig(
        draft_model=(str(folder),),
        target_model=str(target),
        methods=(name,),
        attention_backend=backend,
        device=device().type if backend == "triton" else "cpu",
    )
    method = build_methods(config, lambda _line: None)[name]
    drawn = counted_chains(monkeypatch)
    num_rounds = 1 if backend == "triton" else MEETINGS_BEFORE_RECORDING + 1
    monkeypatch.setattr("outrider.drafting.warm_up._NUM_ROUNDS", num_rounds)  # interpreted rounds take seconds
    most_sessions = 1 if backend == "triton" else 2
    monkeypatch.setattr("outrider.drafting.warm_up._NUM_SESSIONS", tuple(range(1, most_sessions + 1)))
    proposed: list[int] = []
    propose = method.propose

    def counted(sessions: list[DraftSession]):  # type: ignore[no-untyped-def]
        proposals = propose(sessions)
        proposed.extend(len(proposal.token_ids) for proposal in proposals)
        assert sessions[0].missing_hidden_from is None
        return proposals

    method.propose = counted  # type: ignore[method-assign, assignment]
    warm_up(method, budget_s=60.0)
    assert proposed == [3] * (1 + num_rounds * (1 + sum(range(1, most_sessions + 1))))
    draws = backend == "triton" or name.startswith(("eagle", "dspark"))
    assert len(drawn) == (len(proposed) - num_rounds if draws else 0), "what is penalised grows"


def test_a_failing_method_is_left_closed(tmp_path: Path) -> None:
    """What fails at start fails loudly, and not with a session open."""
    loaded = load_model(str(save_llama(tmp_path, seed=5, num_layers=1)), dtype="float32")
    blocks = BlockManager(20, 4)
    method = draft_model_method(
        DraftModelNet(ModelRunner(loaded, loaded.make_cache(20, 4)), blocks, prefill_chunk_size=32), "tiny"
    )
    method.propose = lambda _sessions: (_ for _ in ()).throw(RuntimeError("broken"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="broken"):
        warm_up(method)
    assert blocks.num_free_blocks == 20
