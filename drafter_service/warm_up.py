"""A few proposals for nobody, before anybody is served.

The first session would wait otherwise, for kernels to be compiled and forwards to be recorded (0.36 s for its first
draft of the demo family), and `auto` would learn from it that the method is dear. For methods with a model; what others
remember is their method.
"""

from __future__ import annotations

from drafter_service.methods.interface import DraftMethod
from drafter_service.session import DraftSession
from engine.cpu_graphs import MEETINGS_BEFORE_RECORDING
from shared.messages import DraftMethodInfo, DraftStep, HiddenStates, SessionSpec
from shared.sampling_params import SamplingParams, SpeculationMode

_PROMPT_LEN = 8
_NUM_DRAFT_TOKENS = 3
_NUM_ROUNDS = MEETINGS_BEFORE_RECORDING + 1
# The second kind draws from laws: on a device that is a graph of its own, captured at its first meeting.
_GREEDY = (SamplingParams(temperature=0.0), SpeculationMode.EXACT)
_DRAWN = (SamplingParams(temperature=1.0), SpeculationMode.REJECTION)


def warm_up(method: DraftMethod) -> None:
    """Rounds of sessions whose drafts are all accepted; nothing of them stays at the method but its speed."""
    _rounds(method, *_GREEDY, _NUM_ROUNDS)
    _rounds(method, *_DRAWN, 1)


def _rounds(method: DraftMethod, params: SamplingParams, mode: SpeculationMode, num_rounds: int) -> None:
    prompt = tuple(range(_PROMPT_LEN))
    spec = SessionSpec("warm-up", 1, prompt, (), params, mode, 0)
    session = DraftSession(spec, list(prompt), lambda _reply: None)
    method.open(session)
    try:
        while method.advance(session):
            pass
        accepted: tuple[int, ...] = ()
        for _ in range(num_rounds):
            hidden = _rows_for(method.info, session, len(accepted))
            session.report(DraftStep(1, session.committed_len, accepted, _NUM_DRAFT_TOKENS, hidden))
            (proposal,) = method.propose([session])
            accepted = (*proposal.token_ids, 0)
    finally:
        method.close(session)


def _rows_for(info: DraftMethodInfo, session: DraftSession, num_new: int) -> tuple[HiddenStates, ...]:
    """Zeros in the place of the target's hidden states, up to the newest token but one."""
    if not info.hidden_layers:
        return ()
    first = session.hidden.end - _PROMPT_LEN
    num_rows = session.committed_len + num_new - 1 - first
    data = bytes(4 * len(info.hidden_layers) * num_rows * info.hidden_size)
    return (HiddenStates(first, info.hidden_layers, num_rows, info.hidden_size, "float32", data),)
