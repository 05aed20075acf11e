"""Every pair of axis values, for every model: one SHA-256 per request, whoever drafts and however it is computed.

That is a storm on some models; one crowd on one model is no storm. All models: `python -m tests.grid`, about half an
hour on two cores. The whole product takes hours: `python -m tests.grid --full`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from outrider.engine.sampling.coupling import coupled_sample
from outrider.shared.messages import Proposal
from outrider.verifier_service import host_sampling
from outrider.verifier_service.acceptance import coupled
from outrider.verifier_service.acceptance.outcome import Acceptance, LawAt
from outrider.verifier_service.rounds import Rounds
from tests.grid.cells import DRAFTERS, PARAMETERS, SHAPES, Cell, all_cells, covering_sample, pairs_of
from tests.grid.grid import Grid, Outcome, Report, first_difference
from tests.grid.models import TOKENIZER_FOLDER, grid_model
from tests.grid.requests import NUM_TOKENS, PARAMS

# Two processes of one thread each: one process with two threads leaves half of a two-core machine idle.
_NUM_PROCESSES = 2
# A model of the storm takes four minutes of processor time, which a busy machine gives out slowly; the first
# test waits for a whole one.
pytestmark = pytest.mark.timeout(900)
# Both dtypes, experts, soft caps and windows, chunked attention, integer products, and both 8-bit caches.
_STORM_MODELS = ("demo-bfloat16", "gemma2-bfloat16-fp8", "w8-bfloat16", "llama4-float32-int8")


def run_model(name: str, seed: int) -> Report:
    """In a process of its own. Another seed gives other cells, crowds and random drafts."""
    with tempfile.TemporaryDirectory() as folder:
        grid = Grid(grid_model(name, Path(folder)), seed=seed)
        try:
            return grid.run(covering_sample(seed))
        finally:
            grid.close()


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, Future[Report]]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_NUM_PROCESSES, mp_context=context) as executor:
        yield {name: executor.submit(run_model, name, seed) for seed, name in enumerate(_STORM_MODELS)}
        executor.shutdown(cancel_futures=True)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.storm) for name in _STORM_MODELS])
def report(request: pytest.FixtureRequest, running: dict[str, Future[Report]]) -> Report:
    return running[request.param].result()


def test_the_output_is_one_function_of_the_request(report: Report) -> None:
    assert not report.mismatches, "\n".join(str(outcome) for outcome in report.mismatches)
    hashes = {(outcome.cell.parameters, outcome.digest) for outcome in report.outcomes}
    assert hashes == set(report.digests.items())
    # Were two requests the same, so would be what they prove.
    assert len(set(report.digests.values())) == len(PARAMS)


def test_every_pair_of_values_occurred(report: Report) -> None:
    wanted = set().union(*(pairs_of(cell) for cell in all_cells()))
    assert wanted == set().union(*(pairs_of(outcome.cell) for outcome in report.outcomes))


def test_each_value_did_what_it_is_for(report: Report) -> None:
    drafted = {cell: outcome.num_draft_tokens for cell, outcome in _by_cell(report)}
    accepted = {cell: outcome.num_accepted_tokens for cell, outcome in _by_cell(report)}
    # Every method proposed, with hidden states that came over the wire where it takes them.
    assert {cell.drafter for cell, count in drafted.items() if count} == set(DRAFTERS)
    noise = [cell for cell in drafted if cell.drafter == "noise"]
    assert sum(accepted[cell] for cell in noise) < 0.01 * sum(drafted[cell] for cell in noise)
    for cell in drafted:
        if cell.drafter == "oracle" and cell.shape == "chain":
            assert 0 < accepted[cell] == drafted[cell]
    guesses = [cell for cell in drafted if cell.drafter == "draft_model"]
    assert 0.05 < sum(accepted[cell] for cell in guesses) / sum(drafted[cell] for cell in guesses) < 0.95
    assert sum(accepted[cell] for cell in drafted if cell.drafter == "ngram") > 0
    assert report.num_preemptions > 5
    for cell, outcome in _by_cell(report):
        if cell.cache != "preempted":
            assert (outcome.num_cached_tokens > 0) == (cell.cache == "hit"), outcome


def test_the_grammar_was_followed(report: Report) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FOLDER / "tokenizer.json"))
    output = report.plain["grammar"]
    assert len(output) == NUM_TOKENS
    text = tokenizer.decode(list(output), skip_special_tokens=False)
    assert "".join(text.split()).startswith('[{"name":')


def _by_cell(report: Report) -> list[tuple[Cell, Outcome]]:
    return [(outcome.cell, outcome) for outcome in report.outcomes]


# ---- one crowd ----


@pytest.fixture(scope="module")
def small_grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    grid = Grid(grid_model("mixtral-float32", tmp_path_factory.mktemp("models")))
    yield grid
    grid.close()


def test_every_drafter_at_once_and_no_output_changes(small_grid: Grid) -> None:
    axes = zip(DRAFTERS, itertools.cycle(SHAPES), itertools.cycle(PARAMETERS), itertools.cycle(("hit", "evicted")))
    report = small_grid.run([Cell(drafter, 3, *axis, "eight", "chunk16", cache) for drafter, *axis, cache in axes])
    assert not report.mismatches, "\n".join(str(outcome) for outcome in report.mismatches)
    assert {outcome.cell.drafter for outcome in report.outcomes if outcome.num_draft_tokens} == set(DRAFTERS)


# ---- what the grid must catch ----


def _oracle(parameters: str, shape: str) -> Cell:
    return Cell("oracle", 5, shape, parameters, "alone", "whole", "evicted")


def test_kv_rows_left_where_a_tree_wrote_them_are_caught(small_grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = _oracle("greedy", "tree")
    assert small_grid.run([cell]).mismatches == []
    monkeypatch.setattr(Rounds, "_compact", lambda *_args: None)
    (outcome,) = small_grid.run([cell]).mismatches
    assert outcome.cell == cell


def _by_round(accept: Callable[..., Acceptance]) -> Callable[..., Acceptance]:
    def mutant(law_at: LawAt, proposal: Proposal, *, stream_key: int) -> Acceptance:
        """The noise of a round's first position for all of its positions."""
        first = coupled_sample(law_at(-1), stream_key, proposal.base_len)
        if not proposal.token_ids or proposal.token_ids[0] != first:
            return accept(law_at, proposal, stream_key=stream_key)
        return Acceptance((0,), coupled_sample(law_at(0), stream_key, proposal.base_len))

    return mutant


def test_noise_of_a_round_instead_of_a_position_is_caught(small_grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = _oracle("t1.3", "chain")
    assert small_grid.run([cell]).mismatches == []
    # The rule of the sessions that are decided row by row; no session is decided by the compiled one here.
    monkeypatch.setattr(host_sampling, "compiled_acceptance", lambda: None)
    monkeypatch.setattr(coupled, "accept", _by_round(coupled.accept))
    (outcome,) = small_grid.run([cell]).mismatches
    assert outcome.first_difference == 1


def test_first_difference() -> None:
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 4, 3)) == 1
    assert first_difference((1, 2, 3), (1, 2)) == 2
