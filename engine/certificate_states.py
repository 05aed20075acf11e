"""Assigns recurrent states to the certificate's histories: the slot that a step reads, and the rows it replays."""

from __future__ import annotations

from dataclasses import replace

from outrider.engine.certificate_trace import History, Step
from outrider.engine.recurrent.rows import StateRows

# slots; our sequence reads one and writes the other; each of the other sessions has one
_OUR_SLOTS = 2
MOST_SESSIONS = 4
NUM_SLOTS = _OUR_SLOTS + MOST_SESSIONS


def with_states(history: History, num_prompt: int) -> History:
    """Returns the same steps with states.

    Tokens from position num_prompt on are drafts, and all of them are accepted. In a step that starts at position 0,
    every token is committed.
    """
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
    """Returns the state of another session, all of whose tokens are computed in one step."""
    return StateRows(None, (), _OUR_SLOTS + place, num_rows)
