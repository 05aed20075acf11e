"""Makes a few proposals before the drafter serves, so that kernels are compiled and forwards recorded.

Otherwise the first sessions would wait (0.36 s for the demo family's first draft), and the cost model of `auto` would
learn inflated draft costs from them. Only for methods with a model.
"""

from __future__ import annotations

import time

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.session import DraftSession
from outrider.engine.run.cpu_graphs import MEETINGS_BEFORE_RECORDING, ROW_BUCKETS
from outrider.engine.sampling.coupling import compiled_race
from outrider.shared.messages import DraftMethodInfo, DraftStep, HiddenStates, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode

_PROMPT_LEN = 8
_NUM_DRAFT_TOKENS = 3
# rounds; the first reads the prompt; the others accept 0, 1, ... all of the drafts in turn
_NUM_ROUNDS = 1 + MEETINGS_BEFORE_RECORDING * (1 + _NUM_DRAFT_TOKENS)
# sessions; with one and with two rows each, they cover every recorded forward size
_NUM_SESSIONS = tuple(sorted({size if 2 * size <= max(ROW_BUCKETS) else size // 2 for size in ROW_BUCKETS}))
_BUDGET_S = 2.0
# Rejection mode samples from distributions: on a GPU a separate graph, captured on first use.
_GREEDY = (SamplingParams(temperature=0.0), SpeculationMode.EXACT)
_DRAWN = (SamplingParams(temperature=1.0), SpeculationMode.REJECTION)
# Penalties make a draft grow token by token where plain chains are drawn in one program.
_PENALISED = (SamplingParams(temperature=0.0, presence_penalty=0.1), SpeculationMode.EXACT)


def warm_up(method: DraftMethod, *, budget_s: float = _BUDGET_S) -> None:
    """Runs rounds of sessions that accept from none to all of their drafts; the method keeps none of the sessions.

    budget_s: no larger number of sessions is started after this time.
    """
    compiled_race()  # for exact mode, which these rounds do not use
    deadline = time.perf_counter() + budget_s
    _rounds(method, *_DRAWN, num_rounds=1, num_sessions=1)
    _rounds(method, *_PENALISED, num_rounds=_NUM_ROUNDS, num_sessions=1)
    for num_sessions in _NUM_SESSIONS:
        _rounds(method, *_GREEDY, num_rounds=_NUM_ROUNDS, num_sessions=num_sessions)
        if time.perf_counter() > deadline:
            break


def _rounds(
    method: DraftMethod, params: SamplingParams, mode: SpeculationMode, *, num_rounds: int, num_sessions: int
) -> None:
    prompt = tuple(range(_PROMPT_LEN))
    # A salt of its own: no other session may find cached rows of these made-up hidden states.
    spec = SessionSpec("warm-up", 1, prompt, (), params, mode, 0, cache_salt="warm-up")
    sessions = [DraftSession(spec, list(prompt), lambda _reply: None) for _ in range(num_sessions)]
    for session in sessions:
        method.open(session)
    try:
        for session in sessions:
            while method.advance(session):
                pass
        accepted: list[tuple[int, ...]] = [()] * num_sessions
        for number in range(num_rounds):
            for session, news in zip(sessions, accepted, strict=True):
                hidden = _rows_for(method.info, session, len(news))
                session.report(DraftStep(1, session.committed_len, news, _NUM_DRAFT_TOKENS, hidden))
            num_accepted = number % (1 + _NUM_DRAFT_TOKENS)
            accepted = [(*proposal.token_ids[:num_accepted], 0) for proposal in method.propose(sessions)]
    finally:
        for session in sessions:
            method.close(session)


def _rows_for(info: DraftMethodInfo, session: DraftSession, num_new: int) -> tuple[HiddenStates, ...]:
    """Returns zeros as the target's hidden states, up to the newest token but one."""
    if not info.hidden_layers:
        return ()
    first = session.hidden.end - _PROMPT_LEN
    num_rows = session.committed_len + num_new - 1 - first
    data = bytes(4 * len(info.hidden_layers) * num_rows * info.hidden_size)
    return (HiddenStates(first, info.hidden_layers, num_rows, info.hidden_size, "float32", data),)
