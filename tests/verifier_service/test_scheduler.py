"""Who gets rows and blocks: budgets, chunks, cuts of drafts, preemption. Real block manager, no model."""

from __future__ import annotations

import random

import pytest

from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.sampling.laws import LogitsProcessor
from outrider.shared.messages import Proposal, VerifyStep
from outrider.shared.sampling_params import SamplingParams
from outrider.verifier_service.scheduler import MIN_PROMPT_ROWS, Scheduler, Work
from outrider.verifier_service.session import VerifierSession
from tests.verifier_service.engine_client import make_spec

BLOCK_SIZE = 4


def make_scheduler(num_blocks: int = 50, budget: int = 64, chunk: int = 32, max_model_len: int = 200) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, BLOCK_SIZE), budget, chunk, max_model_len)


def make_session(
    opened_at: float, length: int = 10, *, params: SamplingParams | None = None, salt: str = ""
) -> VerifierSession:
    params = params or SamplingParams(temperature=0.0, max_tokens=100)
    prompt = [int(opened_at) + 3] * length
    return VerifierSession(
        spec=make_spec(prompt, params, cache_salt=salt),
        processor=LogitsProcessor(params, prompt, ()),
        on_reply=lambda _reply: None,
        opened_at=opened_at,
        token_ids=list(prompt),
    )


def ask(session: VerifierSession, *draft: int, at: float = 0.0, max_new_tokens: int = 0) -> None:
    proposal = Proposal(session.committed_len, draft, "x") if draft else None
    session.step = VerifyStep(1, session.committed_len, proposal, max_new_tokens)
    session.step_arrived_at = at


def settle(scheduler: Scheduler, work: Work, num_accepted: int = 0) -> None:
    """What the engine does with the outcome of a forward."""
    session = work.session
    if not work.samples:
        session.num_computed += work.num_chain_rows
        return
    drafted = list(work.proposal.token_ids[:num_accepted]) if work.proposal else []
    session.num_computed += work.num_chain_rows + len(drafted)
    session.token_ids += [*drafted, 1]
    scheduler.blocks.truncate(work.table, session.num_computed)
    scheduler.blocks.register(work.table, session.token_ids, session.num_computed)
    session.step = None


def test_nobody_waits_nobody_runs() -> None:
    assert make_scheduler().plan([make_session(0), make_session(1)]) == []


def test_a_prefill_goes_in_chunks_and_samples_at_its_end() -> None:
    scheduler, session = make_scheduler(chunk=4), make_session(0, 10)
    ask(session)
    seen = []
    while session.step is not None:
        (work,) = scheduler.plan([session])
        seen.append((work.num_chain_rows, work.num_logits_rows, work.samples))
        assert len(work.table.block_ids) * BLOCK_SIZE >= session.num_computed + work.num_rows
        settle(scheduler, work)
    assert seen == [(4, 0, False), (4, 0, False), (2, 1, True)]


def test_prompts_that_wait_together_are_read_together() -> None:
    scheduler = make_scheduler(num_blocks=100, budget=64, chunk=32)
    sessions = [make_session(opened_at, length) for opened_at, length in enumerate((10, 20, 30, 15))]
    for session in sessions:
        ask(session)
    plan = scheduler.plan(sessions)
    assert [(work.session, work.num_rows, work.samples) for work in plan] == [
        (sessions[0], 10, True),
        (sessions[1], 20, True),
        (sessions[2], 30, True),
        (sessions[3], 4, False),  # as far as the row budget goes
    ]
    for work in plan:
        settle(scheduler, work)
    for session in sessions[:3]:
        ask(session)
    later = sorted((work.num_rows, work.samples) for work in scheduler.plan(sessions))
    assert later == [(1, True)] * 3 + [(11, True)]


def test_sessions_that_decode_come_before_prefills_and_the_budget_holds() -> None:
    scheduler = make_scheduler(budget=20, chunk=32)
    decoding, prefilling = make_session(0, 6), make_session(1, 30)
    ask(decoding)
    settle(scheduler, scheduler.plan([decoding])[0])
    ask(prefilling, at=1.0)
    ask(decoding, 7, 7, 7, at=2.0)
    plan = scheduler.plan([prefilling, decoding])
    assert [(work.session, work.num_rows) for work in plan] == [(decoding, 4), (prefilling, 16)]


def test_prompts_are_read_in_small_pieces_while_somebody_decodes() -> None:
    scheduler = make_scheduler(budget=64, chunk=32)
    scheduler.rows_while_decoding = lambda: 12
    decoding, first, second = make_session(0, 6), make_session(1, 30), make_session(2, 30)
    ask(decoding)
    settle(scheduler, scheduler.plan([decoding])[0])
    decoding.has_replied = True  # and it drafts now: a long forward would make it wait
    ask(first, at=1.0)
    assert [work.num_rows for work in scheduler.plan([decoding, first])] == [12]
    ask(decoding, 7, 7, 7, at=2.0)
    ask(second, at=3.0)
    plan = scheduler.plan([decoding, first, second])
    assert [(work.session, work.num_rows) for work in plan] == [(decoding, 4), (first, 8)]
    decoding.finished = True
    assert [work.num_rows for work in scheduler.plan([decoding, first, second])] == [4, 30, 30]


def test_prompts_go_on_however_little_is_left_for_them() -> None:
    scheduler = make_scheduler()
    scheduler.rows_while_decoding = lambda: 0
    decoding, prefilling = make_session(0, 6), make_session(1, 30)
    ask(decoding)
    settle(scheduler, scheduler.plan([decoding])[0])
    decoding.has_replied = True
    ask(prefilling, at=1.0)
    ask(decoding, 7, 7, 7, at=2.0)
    plan = scheduler.plan([decoding, prefilling])
    assert [(work.session, work.num_rows) for work in plan] == [(decoding, 4), (prefilling, MIN_PROMPT_ROWS)]


def test_a_draft_waits_for_the_end_of_the_prefill() -> None:
    scheduler, session = make_scheduler(chunk=8), make_session(0, 10)
    ask(session, 7, 7)
    first = scheduler.plan([session])[0]
    assert (first.proposal, first.num_logits_rows) == (None, 0)
    settle(scheduler, first)
    second = scheduler.plan([session])[0]
    assert (second.num_rows, second.num_logits_rows) == (4, 3)


@pytest.mark.parametrize(
    ("max_tokens", "budget", "max_model_len", "max_new_tokens", "expected"),
    [
        (100, 64, 200, 0, 6),
        (4, 64, 200, 0, 3),
        (1, 64, 200, 0, 0),
        (100, 14, 200, 0, 4),
        (100, 10, 200, 0, 0),
        (100, 64, 13, 0, 2),
        (100, 64, 11, 0, 0),
        (100, 64, 200, 4, 3),
        (100, 64, 200, 1, 0),
    ],
)
def test_drafts_are_cut_by_length_to_what_can_be_committed(
    max_tokens: int, budget: int, max_model_len: int, max_new_tokens: int, expected: int
) -> None:
    scheduler = make_scheduler(budget=budget, max_model_len=max_model_len)
    session = make_session(0, 10, params=SamplingParams(temperature=0.0, max_tokens=max_tokens))
    ask(session, 1, 2, 3, 4, 5, 6, max_new_tokens=max_new_tokens)
    (work,) = scheduler.plan([session])
    assert (work.proposal.token_ids if work.proposal else ()) == (1, 2, 3, 4, 5, 6)[:expected]
    assert work.num_rows == 10 + expected


def test_a_draft_is_dropped_before_anybody_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=6)
    idle, session = make_session(0, 12), make_session(1, 11)
    ask(idle)
    settle(scheduler, scheduler.plan([idle])[0])
    ask(session, 7, 7, 7, 7, 7)
    (work,) = scheduler.plan([idle, session])
    assert (work.session, work.proposal, scheduler.num_preemptions) == (session, None, 0)


def test_the_youngest_gives_way_and_the_oldest_always_gets_on() -> None:
    scheduler = make_scheduler(num_blocks=10, budget=100)
    sessions = [make_session(age, 12) for age in range(3)]
    for session in sessions:
        ask(session)
        for work in scheduler.plan([session]):
            settle(scheduler, work)
    assert scheduler.blocks.num_free_blocks == 1
    for session in sessions:
        session.token_ids += [1] * 8
        ask(session)
    (work,) = scheduler.plan([sessions[0], sessions[1], sessions[2]])
    assert work.session is sessions[0]
    assert scheduler.num_preemptions == 1
    assert sessions[1].num_computed == 12, "the youngest gave way, not the next"
    assert sessions[2].num_computed < 12
    scheduler.blocks.check_integrity()


def test_an_older_session_that_waits_is_never_the_victim() -> None:
    scheduler = make_scheduler(num_blocks=4)
    old, young = make_session(0, 12), make_session(1, 12)
    ask(old)
    settle(scheduler, scheduler.plan([old])[0])
    ask(old)
    old.step_arrived_at = 5.0
    ask(young)
    planned = {id(work.session) for work in scheduler.plan([old, young])}
    assert planned == {id(old)}
    assert scheduler.num_preemptions == 0


def test_a_preempted_session_comes_back_from_the_prefix_cache() -> None:
    scheduler, session = make_scheduler(), make_session(0, 12)
    ask(session)
    settle(scheduler, scheduler.plan([session])[0])
    scheduler.preempt(session)
    assert (session.num_computed, session.table) == (0, None)
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
    ask(session)
    (work,) = scheduler.plan([session])
    assert session.num_computed == 12
    assert work.num_chain_rows == 1
    scheduler.blocks.check_integrity()


def test_prompt_logprobs_want_every_row_of_the_prompt() -> None:
    scheduler = make_scheduler(chunk=6)
    params = SamplingParams(temperature=0.0, num_prompt_logprobs=1)
    for _ in range(2):
        session = make_session(0, 10, params=params)
        ask(session, 7)
        rows = []
        while session.step is not None:
            (work,) = scheduler.plan([session])
            rows.append(work.num_logits_rows)
            settle(scheduler, work)
        assert rows == [6, 5], "the second time, too: cached positions have no logits"
        scheduler.release(session)


def test_cutting_back_forgets_tokens_and_their_cache() -> None:
    scheduler, session = make_scheduler(), make_session(0, 6)
    ask(session, 7, 8, 9)
    settle(scheduler, scheduler.plan([session])[0], num_accepted=3)
    assert (session.output_token_ids, session.num_computed) == ([7, 8, 9, 1], 9)
    scheduler.cut_back(session, 4)
    assert session.num_computed == 9
    scheduler.cut_back(session, 1)
    assert session.output_token_ids == [7]
    assert session.num_computed == 4, "position 6 shares a block with what is in the prefix cache"
    scheduler.cut_back(session, 0)
    assert (session.committed_len, session.num_computed) == (0, 4)
    scheduler.blocks.check_integrity()


def test_random_loads_always_make_progress_and_keep_the_books() -> None:
    rng = random.Random(3)
    for trial in range(30):
        scheduler = make_scheduler(num_blocks=rng.randint(8, 16), budget=rng.randint(8, 40), chunk=rng.randint(1, 16))
        params = SamplingParams(temperature=0.0, max_tokens=rng.randint(4, 12))
        sessions = [make_session(age, rng.randint(1, 16), params=params) for age in range(rng.randint(1, 6))]
        for forward in range(2000):
            for session in sessions:
                if session.step is None and session.committed_len < params.max_tokens and rng.random() < 0.7:
                    ask(session, *[rng.randrange(9) for _ in range(rng.randint(0, 5))], at=float(forward))
            waiting = [session for session in sessions if session.step is not None]
            plan = scheduler.plan(sessions)
            assert bool(plan) == bool(waiting), f"trial {trial}: nobody gets on"
            assert sum(work.num_rows for work in plan) <= scheduler.max_num_batched_tokens
            assert len({id(work.session) for work in plan}) == len(plan)
            written = [
                block for work in plan for block in work.table.block_ids[work.session.num_computed // BLOCK_SIZE :]
            ]
            assert len(set(written)) == len(written), "two sessions write one block"
            for work in plan:
                drafted = len(work.proposal.token_ids) if work.proposal else 0
                settle(scheduler, work, rng.randint(0, drafted))
                assert work.session.committed_len <= params.max_tokens
            scheduler.blocks.check_integrity()
            if all(session.committed_len == params.max_tokens for session in sessions):
                break
        else:
            raise AssertionError(f"trial {trial} did not end")
        for session in sessions:
            scheduler.release(session)
        assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
