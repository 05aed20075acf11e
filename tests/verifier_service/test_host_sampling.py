"""What the compiled rules decide against round's, which are numpy row by row: the same on every random case."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.drafting.growth.laws import draw_distinct, sparse_law
from outrider.engine.attention.block_manager import BlockTable
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.rejection_sample.cpu import BLOCK, QUANTILE, RACE, SessionDrafts, accept_sessions
from outrider.shared.messages import LAW_TOTAL, Proposal, SparseLaw
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.verifier_service.host_sampling import drawn_outputs
from outrider.verifier_service.round import Round, decide
from outrider.verifier_service.row_outputs import RowOutputs, host_outputs
from outrider.verifier_service.scheduler import Work
from outrider.verifier_service.session import VerifierSession
from tests.verifier_service.test_round import TIMES, make_session

EXACT, REJECTION = SpeculationMode.EXACT, SpeculationMode.REJECTION
PLAIN = SamplingParams(temperature=0.8, max_tokens=50)
# Of one chunk, of several, and with a tail in each vector.
SIZES = (8, 700, 4096, 49_155)
TRUNCATIONS = (
    {},
    {"temperature": 1.0},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.05},
    {"top_p": 0.95, "temperature": 1.7},
)
KINDS = ("none", "near", "far", "same", "tree")


def work_of(session: VerifierSession, proposal: Proposal | None, num_prompt_rows: int = 0) -> Work:
    num_nodes = len(proposal.token_ids) if proposal else 0
    session.num_computed = len(session.token_ids) - 1 - num_prompt_rows
    return Work(session, BlockTable(), 1 + num_prompt_rows, proposal, 1 + num_prompt_rows + num_nodes)


def rounds_of(plan: list[Work], outputs: list[RowOutputs]) -> list[Round]:
    """Without timings, which differ between two calls."""
    rounds = []
    for work, rows in zip(plan, outputs, strict=True):
        num_nodes = len(work.proposal.token_ids) if work.proposal else 0
        found = decide(work, rows.last(num_nodes + 1), 100, TIMES)
        rounds.append(replace(found, commit=replace(found.commit, timings=None)))  # type: ignore[arg-type]
    return rounds


def chain_with_laws(rng: np.random.Generator, rows: np.ndarray, first: int, num_tokens: int, law: str) -> Proposal:
    """A chain drawn from laws near the target's rows, far from them, equal to them, or certain."""
    tokens, laws = [], []
    for place in range(num_tokens):
        row = rows[first + place].astype(np.float64)
        if law == "far":
            row = rng.normal(size=len(row)) * 2
        elif law == "near":
            row = row + rng.normal(size=len(row)) * 0.5
        found = sparse_law(row - row.max())
        if law == "certain":
            found = SparseLaw((int(np.argmax(row)),), (LAW_TOTAL,))
        tokens.append(draw_distinct(found, 1, rng)[0])
        laws.append(found)
    return Proposal(0, tuple(tokens), "x", laws=tuple(laws))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", [EXACT, REJECTION])
def test_rounds_are_those_of_numpy(size: int, mode: SpeculationMode) -> None:
    rng = np.random.default_rng(size)
    num_rounds = 12 if size < 10_000 else 1
    accepted: set[int] = set()
    for number in range(num_rounds):
        logits = torch.from_numpy(rng.normal(size=(400, size)).astype(np.float32) * (1 + number % 4))
        rows, plan, first = logits.numpy(), [], 0
        for index, (changed, kind) in enumerate(
            itertools.product(TRUNCATIONS, ("none", "near", "far", "same", "tree"))
        ):
            rule = "block" if (number + index) % 2 else "standard"
            session = make_session(replace(PLAIN, **changed), mode, stream_key=1000 * number + index, chain_rule=rule)
            session.spec = replace(session.spec, epoch=number + 1)
            proposal = None
            if kind == "tree":
                likely = np.argsort(-rows[first])[:2].tolist()
                proposal = Proposal(0, (*likely, *likely), "x", parents=(-1, -1, 0, 1))
            elif kind != "none":
                proposal = chain_with_laws(rng, rows, first, 3, "certain" if kind == "same" and index % 3 else kind)
            plan.append(work_of(session, proposal))
            first += plan[-1].num_logits_rows
        ours, theirs = drawn_outputs(plan, logits[:first]), host_outputs(plan, logits[:first])
        assert all(rows.acceptance is not None for rows in ours)
        assert rounds_of(plan, ours) == rounds_of(plan, theirs)
        accepted |= {len(rows.acceptance.accepted_nodes) for rows in ours if rows.acceptance is not None}
    assert accepted >= ({0, 1, 2, 3} if size < 10_000 else {0, 1})


@pytest.mark.parametrize("mode", [EXACT, REJECTION])
def test_a_session_decides_alike_alone_and_beside_others_on_any_number_of_threads(mode: SpeculationMode) -> None:
    """The same bytes in every batch: a session's decision reads its rows alone, in one order."""
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(size=(80, 5000)).astype(np.float32))
    plan, first = [], 0
    for index, changed in enumerate(2 * TRUNCATIONS):
        session = make_session(replace(PLAIN, **changed), mode, stream_key=index, chain_rule="block")
        plan.append(work_of(session, chain_with_laws(rng, logits.numpy(), first, 3, "near")))
        first += 4
    together = [rows.acceptance for rows in drawn_outputs(plan, logits[:first])]
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            assert [rows.acceptance for rows in drawn_outputs(plan, logits[:first])] == together
    finally:
        torch.set_num_threads(threads)
    alone = [drawn_outputs([work], logits[4 * place : 4 * place + 4])[0].acceptance for place, work in enumerate(plan)]
    assert alone == together


def test_a_row_of_nothing_is_an_error_of_its_session() -> None:
    law = SparseLaw((1, 2), (LAW_TOTAL // 2, LAW_TOTAL // 2))
    for mode, laws in ((EXACT, ()), (REJECTION, ()), (REJECTION, (law,))):
        for nothing in (-torch.inf, torch.nan):
            plan = [work_of(make_session(PLAIN, mode), Proposal(0, (1,), "x", laws=laws)) for _ in range(2)]
            logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
            logits[0] = nothing
            outputs = drawn_outputs(plan, logits)
            with pytest.raises(ArithmeticError, match="no finite logit"):
                rounds_of(plan[:1], outputs[:1])
            assert rounds_of(plan[1:], outputs[1:]) == rounds_of(plan[1:], host_outputs(plan, logits)[1:])


def test_what_a_kernel_cannot_take_is_refused() -> None:
    law = (np.array([1, 2]), np.array([0.5, 0.5]))
    numbers = {"uniforms": np.zeros(4)}
    logits, params = torch.zeros(2, 10), (1.0, 0, 1.0, 0.0)
    refused = (
        SessionDrafts(BLOCK, 0, params, (3,), laws=(law,), **numbers),  # a token without mass in its law
        SessionDrafts(BLOCK, 0, params, (1,), laws=(), **numbers),
        SessionDrafts(BLOCK, 0, params, (1,), laws=((np.array([1, 10]), law[1]),), **numbers),
        SessionDrafts(RACE, 0, params, (1,), key_words=np.zeros((1, 2), np.uint32)),
        SessionDrafts(QUANTILE, 0, params, (10,), **numbers),
        SessionDrafts(QUANTILE, 1, params, (1,), **numbers),
        SessionDrafts(QUANTILE, 0, (0.0, 0, 1.0, 0.0), (1,), **numbers),
    )
    for session in refused:
        with pytest.raises(KernelArgumentError):
            accept_sessions(logits, [session], 1)
