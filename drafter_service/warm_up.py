"""A few proposals for nobody, before anybody is served.

The first session would wait otherwise, for kernels to be compiled and forwards to be recorded (0.36 s for its first
draft of the demo family), and `auto` would learn from it that the method is dear; so would the first eight that come
together (64 tokens/s less for their first 200 rounds). For methods with a model; what others remember is their method.
"""

from __future__ import annotations

import time

from drafter_service.methods.interface import DraftMethod
from drafter_service.session import DraftSession
from engine.coupling import compiled_race
from engine.cpu_graphs import MEETINGS_BEFORE_RECORDING, ROW_BUCKETS
from shared.messages import DraftMethodInfo, DraftStep, HiddenStates, SessionSpec
from shared.sampling_params import SamplingParams, SpeculationMode

_PROMPT_LEN = 8
_NUM_DRAFT_TOKENS = 3
_NUM_ROUNDS = MEETINGS_BEFORE_RECORDING + 1
# With one row of each session and with two, forwards of every size that is recorded are met.
_NUM_SESSIONS = tuple(sorted({size if 2 * size <= max(ROW_BUCKETS) else size // 2 for size in ROW_BUCKETS}))
_BUDGET_S = 2.0
# The second kind draws from laws: on a device that is a graph of its own, captured at its first meeting.
_GREEDY = (SamplingParams(temperature=0.0), SpeculationMode.EXACT)
_DRAWN = (SamplingParams(temperature=1.0), SpeculationMode.REJECTION)


def warm_up(method: DraftMethod, *, budget_s: float = _BUDGET_S) -> None:
    """Rounds of sessions whose drafts are all accepted; nothing of them stays at the method but its speed.

    budget_s: no further number of sessions is begun with after so long.
    """
    compiled_race()  # of exact mode, in which nothing is drafted here
    deadline = time.perf_counter() + budget_s
    _rounds(method, *_DRAWN, num_rounds=1, num_sessions=1)
    for num_sessions in _NUM_SESSIONS:
        _rounds(method, *_GREEDY, num_rounds=_NUM_ROUNDS, num_sessions=num_sessions)
        if time.perf_counter() > deadline:
            break


def _rounds(
    method: DraftMethod, params: SamplingParams, mode: SpeculationMode, *, num_rounds: int, num_sessions: int
) -> None:
    prompt = tuple(range(_PROMPT_LEN))
    # What methods keep of its made-up hidden states must be found by nobody else.
    spec = SessionSpec("warm-up", 1, prompt, (), params, mode, 0, cache_salt="warm-up")
    sessions = [DraftSession(spec, list(prompt), lambda _reply: None) for _ in range(num_sessions)]
    for session in sessions:
        method.open(session)
    try:
        for session in sessions:
            while method.advance(session):
                pass
        accepted: list[tuple[int, ...]] = [()] * num_sessions
        for _ in range(num_rounds):
            for session, news in zip(sessions, accepted, strict=True):
                hidden = _rows_for(method.info, session, len(news))
                session.report(DraftStep(1, session.committed_len, news, _NUM_DRAFT_TOKENS, hidden))
            accepted = [(*proposal.token_ids, 0) for proposal in method.propose(sessions)]
    finally:
        for session in sessions:
            method.close(session)


def _rows_for(info: DraftMethodInfo, session: DraftSession, num_new: int) -> tuple[HiddenStates, ...]:
    """Zeros in the place of the target's hidden states, up to the newest token but one."""
    if not info.hidden_layers:
        return ()
    first = session.hidden.end - _PROMPT_LEN
    num_rows = session.committed_len + num_new - 1 - first
    data = bytes(4 * len(info.hidden_layers) * num_rows * info.hidden_size)
    return (HiddenStates(first, info.hidden_layers, num_rows, info.hidden_size, "float32", data),)
