"""The recurrent states of the certificate's histories: which slot each step reads, which rows it replays."""

from __future__ import annotations

from dataclasses import replace

from outrider.engine.certificate_trace import History, Step
from outrider.engine.recurrent.rows import StateRows

# of our sequence, which reads one and writes the other; the other sessions have one each
_OUR_SLOTS = 2
MOST_SESSIONS = 4
NUM_SLOTS = _OUR_SLOTS + MOST_SESSIONS


def with_states(history: History, num_prompt: int) -> History:
    """The same steps with states. Tokens from position num_prompt on are drafts, all of which are accepted, but in a
    step from position 0 on."""
    steps: list[Step] = []
    slot: int | None = None
    log_rows: dict[int, int] = {}  # position -> row of our slot's log
    for step in history:
        ours = step.sessions[step.ours]
        start, count = ours.context_len, len(ours.token_ids)
        num_committed = min(count, max(1, num_prompt - start)) if start else count
        before = slot if start else None
        kept_rows = [log_rows[position] for position in sorted(log_rows) if position < start] if start else []
        slot = 0 if before != 0 else 1
        state = StateRows(before, kept_rows, slot, num_committed)
        log_rows = {
            position: row - num_committed + 1
            for position, row in step.row_of_position.items()
            if row >= num_committed - 1
        }
        sessions = [
            replace(rows, state=state if place == step.ours else _stranger(place, len(rows.token_ids)))
            for place, rows in enumerate(step.sessions)
        ]
        steps.append(replace(step, sessions=tuple(sessions)))
    return tuple(steps)


def _stranger(place: int, num_rows: int) -> StateRows:
    """All of whose tokens are computed in one step."""
    return StateRows(None, (), _OUR_SLOTS + place, num_rows)
