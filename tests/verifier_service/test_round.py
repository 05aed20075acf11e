"""From logits to a commit: stops, counts, origins, log-probabilities, and which rule decides. No model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.engine.attention.block_manager import BlockTable
from outrider.engine.sampling.coupling import coupled_sample
from outrider.engine.sampling.laws import LogitsProcessor, token_logprob
from outrider.shared.messages import LAW_TOTAL, FinishReason, Proposal, SparseLaw, TokenOrigin
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.verifier_service.round import ForwardTimes, Round, acceptance_rng, decide
from outrider.verifier_service.row_outputs import RowOutputs
from outrider.verifier_service.scheduler import Work
from outrider.verifier_service.session import VerifierSession
from tests.verifier_service.acceptance.toy import SMALLEST_P_VALUE, chi_square_p_value
from tests.verifier_service.engine_client import make_spec

VOCAB_SIZE = 8
TIMES = ForwardTimes(1.0, 2.0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=50)
ACCEPTED, CORRECTED, BONUS, TARGET = (
    TokenOrigin.ACCEPTED,
    TokenOrigin.CORRECTED,
    TokenOrigin.BONUS,
    TokenOrigin.TARGET,
)


def make_session(
    params: SamplingParams = GREEDY,
    mode: SpeculationMode = SpeculationMode.EXACT,
    *,
    output: tuple[int, ...] = (),
    stream_key: int = 5,
    eos_token_ids: tuple[int, ...] = (),
    **fields: Any,
) -> VerifierSession:
    return VerifierSession(
        spec=make_spec((1, 2), params, mode, stream_key=stream_key),
        processor=LogitsProcessor(params, (1, 2), eos_token_ids),
        on_reply=lambda _reply: None,
        opened_at=0.0,
        token_ids=[1, 2, *output],
        **fields,
    )


def rows_for(*best: int) -> np.ndarray:
    """float32 [rows, V] whose argmax is given, all else distinct and random."""
    rows = np.random.default_rng(1).standard_normal((len(best), VOCAB_SIZE)).astype(np.float32)
    rows[range(len(best)), list(best)] = 9.0
    return rows


def run(session: VerifierSession, logits: np.ndarray, proposal: Proposal | None, max_model_len: int = 100) -> Round:
    return decide(Work(session, BlockTable(), 1, proposal, len(logits)), RowOutputs(logits), max_model_len, TIMES)


def chain(*tokens: int, base_len: int = 0) -> Proposal:
    return Proposal(base_len, tokens, "x")


@pytest.mark.parametrize(
    ("drafted", "best", "tokens", "origins", "num_accepted"),
    [
        ((), (3,), (3,), (TARGET,), 0),
        ((4, 5), (4, 5, 6), (4, 5, 6), (ACCEPTED, ACCEPTED, BONUS), 2),
        ((4, 5), (4, 3, 6), (4, 3), (ACCEPTED, CORRECTED), 1),
        ((4, 5), (3, 5, 6), (3,), (CORRECTED,), 0),
    ],
)
def test_chains(
    drafted: tuple[int, ...],
    best: tuple[int, ...],
    tokens: tuple[int, ...],
    origins: tuple[TokenOrigin, ...],
    num_accepted: int,
) -> None:
    found = run(make_session(), rows_for(*best), chain(*drafted) if drafted else None)
    commit = found.commit
    assert (commit.token_ids, commit.origins) == (tokens, origins)
    assert (commit.num_draft_tokens, commit.num_accepted_tokens) == (len(drafted), num_accepted)
    assert found.kept_nodes == tuple(range(num_accepted))
    assert (commit.finish_reason, commit.stop_token_id, commit.more) == (None, None, False)


def test_a_tree_keeps_the_path_that_was_accepted() -> None:
    #        root -> 3, 4;   4 -> 5, 6;   6 -> 7
    proposal = Proposal(0, (3, 4, 5, 6, 7), "x", parents=(-1, -1, 1, 1, 3))
    found = run(make_session(), rows_for(4, 0, 6, 0, 1, 0), proposal)
    assert found.commit.token_ids == (4, 6, 1)
    assert found.commit.origins == (ACCEPTED, ACCEPTED, CORRECTED)
    assert found.kept_nodes == (1, 3)
    found = run(make_session(), rows_for(4, 0, 6, 0, 7, 2), proposal)
    assert found.commit.token_ids == (4, 6, 7, 2)
    assert found.commit.origins[-1] is BONUS
    assert found.kept_nodes == (1, 3, 4)


@pytest.mark.parametrize(
    ("params", "eos_token_ids", "tokens", "num_accepted", "finish"),
    [
        (GREEDY, (4,), (4,), 1, (FinishReason.STOP, None)),
        (replace(GREEDY, stop_token_ids=(5,)), (), (4, 5), 2, (FinishReason.STOP, 5)),
        (replace(GREEDY, stop_token_ids=(6,)), (5,), (4, 5), 2, (FinishReason.STOP, None)),
        (replace(GREEDY, stop_token_ids=(7,)), (), (4, 5, 6, 7), 3, (FinishReason.STOP, 7)),
        (replace(GREEDY, max_tokens=2), (), (4, 5), 2, (FinishReason.LENGTH, None)),
        (replace(GREEDY, max_tokens=4), (), (4, 5, 6, 7), 3, (FinishReason.LENGTH, None)),
        (replace(GREEDY, max_tokens=2), (5,), (4, 5), 2, (FinishReason.STOP, None)),
    ],
)
def test_stops_inside_an_accepted_draft_cut_tokens_counts_origins_and_logprobs(
    params: SamplingParams,
    eos_token_ids: tuple[int, ...],
    tokens: tuple[int, ...],
    num_accepted: int,
    finish: tuple[FinishReason, int | None],
) -> None:
    session = make_session(replace(params, num_logprobs=1), eos_token_ids=eos_token_ids, free_run_left=9)
    found = run(session, rows_for(4, 5, 6, 7), chain(4, 5, 6))
    commit = found.commit
    assert commit.token_ids == tokens
    assert (commit.num_draft_tokens, commit.num_accepted_tokens) == (3, num_accepted)
    assert len(commit.origins) == len(commit.logprobs) == len(tokens)
    assert found.kept_nodes == tuple(range(num_accepted))
    assert (commit.finish_reason, commit.stop_token_id, commit.more) == (*finish, False)


@pytest.mark.parametrize(("max_model_len", "count"), [(6, 4), (5, 3), (4, 2), (3, 1)])
def test_the_end_of_the_context(max_model_len: int, count: int) -> None:
    commit = run(make_session(), rows_for(4, 5, 6, 7), chain(4, 5, 6), max_model_len).commit
    assert commit.token_ids == (4, 5, 6, 7)[:count]
    assert commit.finish_reason is FinishReason.LENGTH


def test_a_free_run_goes_on_until_its_tokens_are_used_up() -> None:
    for left, more in ((0, False), (1, False), (2, True)):
        assert run(make_session(free_run_left=left), rows_for(4), None).commit.more is more


def test_logprobs_are_the_models_own_of_the_row_before_each_token() -> None:
    params = SamplingParams(temperature=0.5, top_k=1, logit_bias=((4, 50.0),), num_logprobs=3, max_tokens=50)
    logits = np.random.default_rng(2).standard_normal((3, VOCAB_SIZE)).astype(np.float32)
    proposal = Proposal(0, (3, 4), "x", parents=(-1, -1))
    commit = run(make_session(params), logits, proposal).commit
    assert commit.token_ids == (4, 4)
    assert commit.logprobs == (token_logprob(logits[0], 4, 3), token_logprob(logits[2], 4, 3))


def test_logprobs_of_tokens_by_name_are_in_place_of_the_likeliest() -> None:
    params = SamplingParams(temperature=0.0, num_logprobs=2, logprob_token_ids=(5, 4, 0))
    logits = np.random.default_rng(2).standard_normal((1, VOCAB_SIZE)).astype(np.float32)
    [shown] = run(make_session(params), logits, None).commit.logprobs
    law = logits[0].astype(np.float64) - np.logaddexp.reduce(logits[0].astype(np.float64))
    assert shown.top_token_ids == (5, 4, 0)
    np.testing.assert_allclose(shown.top_logprobs, law[[5, 4, 0]], rtol=1e-12)


def test_exact_mode_uses_the_absolute_index_and_the_path_of_each_node() -> None:
    """Penalties at a node see the output and the node's own ancestors, not its siblings."""
    params = SamplingParams(temperature=1.1, frequency_penalty=1.5, repetition_penalty=1.4, max_tokens=50)
    rng = np.random.default_rng(3)
    for key in range(40):
        logits = rng.standard_normal((6, VOCAB_SIZE)).astype(np.float32)
        drafted = tuple(int(token) for token in rng.integers(VOCAB_SIZE, size=5))
        proposal = Proposal(2, drafted, "x", parents=(-1, -1, 0, 1, 1))
        session = make_session(params, output=(4, 4), stream_key=key)
        found = run(session, logits, proposal)
        processor = LogitsProcessor(params, (1, 2), ())
        output, row = [4, 4], 0
        for place, token in enumerate(found.commit.token_ids):
            assert token == coupled_sample(processor.log_weights(logits[row], output), key, 2 + place)
            output.append(token)
            row = found.kept_nodes[place] + 1 if place < len(found.kept_nodes) else -1


@pytest.mark.parametrize("chain_rule", ["standard", "block"])
def test_rejection_mode_through_the_real_randomness(chain_rule: str) -> None:
    """The generator of each round comes from stream key, epoch and index: over keys its tokens follow the law."""
    params = SamplingParams(temperature=1.0, max_tokens=50)
    logits = np.log(
        np.array([[0.4, 0.3, 0.1, 0.1, 0.05, 0.03, 0.01, 0.01], [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2, 0.2]])
    ).astype(np.float32)
    law = SparseLaw((2, 0, 5), (LAW_TOTAL // 2, LAW_TOTAL // 4, LAW_TOTAL // 4))
    draft_rng = np.random.default_rng(4)
    counts = np.zeros(VOCAB_SIZE, dtype=np.int64)
    for key in range(8000):
        token = law.token_ids[int(np.searchsorted(np.cumsum(law.counts), draft_rng.integers(LAW_TOTAL), "right"))]
        session = make_session(params, SpeculationMode.REJECTION, stream_key=key, chain_rule=chain_rule)
        counts[run(session, logits, Proposal(0, (token,), "x", laws=(law,))).commit.token_ids[0]] += 1
    probs = np.exp(logits[0].astype(np.float64))
    assert chi_square_p_value(counts, probs / probs.sum()) > SMALLEST_P_VALUE


def test_rejection_mode_repeats_itself_and_differs_by_key_epoch_and_index() -> None:
    def first(*key: int) -> float:
        return float(acceptance_rng(*key).random())

    assert first(1, 2, 3) == first(1, 2, 3)
    keys = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (2**64 - 1, 2, 3), (1 + 2**32, 2, 3), (1, 2, 3 + 2**32)]
    assert len({first(*key) for key in keys}) == len(keys)


def test_greedy_without_edits_takes_the_same_decisions_as_the_general_rule() -> None:
    """The short cut for plain argmax against the coupled rule over laws of one token."""
    rng = np.random.default_rng(6)
    edited = replace(GREEDY, logit_bias=((0, 0.0),))
    assert make_session().processor.is_plain_argmax
    assert not make_session(edited).processor.is_plain_argmax
    for _ in range(200):
        num_nodes = int(rng.integers(0, 6))
        logits = rng.integers(0, 3, (num_nodes + 1, VOCAB_SIZE)).astype(np.float32)  # full of ties
        drafted = tuple(int(token) for token in rng.integers(0, 3, num_nodes))
        parents = tuple(int(rng.integers(-1, node)) for node in range(num_nodes)) if rng.random() < 0.5 else ()
        proposal = Proposal(0, drafted, "x", parents=parents)
        plain, general = run(make_session(), logits, proposal), run(make_session(edited), logits, proposal)
        assert plain.kept_nodes == general.kept_nodes
        assert plain.commit.token_ids == general.commit.token_ids
        assert plain.commit.origins == general.commit.origins


def test_timings_are_microseconds_of_queue_forward_and_sampling() -> None:
    session = make_session()
    session.step_arrived_at = 0.25
    timings = run(session, rows_for(3), None).commit.timings
    assert (timings.queue_us, timings.forward_us) == (750_000, 1_000_000)
    assert timings.total_us >= timings.sample_us > 0


def test_what_was_saved_is_plain_decodings_time_for_the_tokens_less_their_own() -> None:
    """Two tokens in 30 ms, of which 5 ms read others' prompts, where plain decoding takes 20 ms for each."""
    session = make_session()
    times = replace(TIMES, prompts_s=0.005, plain_round_s=0.02)

    def saved_us(times: ForwardTimes) -> int:
        work = Work(session, BlockTable(), 1, Proposal(session.committed_len, (3,), "ngram"), 2)
        commit = decide(work, RowOutputs(rows_for(3, 4)), 100, times).commit
        assert len(commit.token_ids) == 2
        return commit.saved_us

    assert saved_us(times) == 0, "of a first round nobody knows how long it took"
    session.committed_at = times.ended - 0.03
    assert saved_us(times) == pytest.approx(1e6 * (2 * 0.02 - 0.025), abs=2)
    session.committed_at = times.ended - 0.1
    assert saved_us(times) == pytest.approx(1e6 * (2 * 0.02 - 0.095), abs=2), "it may have lost time"
    assert saved_us(replace(times, plain_round_s=0.0)) == 0
