"""A session's rows in a forward: those it computes, those that stay, and log-probabilities of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.engine.attention.batch import SessionRows
from outrider.engine.attention.block_manager import slots_of
from outrider.engine.errors import IntegrityError
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.sampling.laws import token_logprob
from outrider.shared.messages import TokenLogprob
from outrider.verifier_service.scheduler import Work


def session_rows(work: Work) -> SessionRows:
    """The rows that the scheduler planned for one session."""
    session = work.session
    start = session.num_computed
    chain = session.token_ids[start : start + work.num_chain_rows]
    proposal = work.proposal
    state = _state_rows(work)
    if proposal is None:
        return SessionRows(chain, start, work.table.block_ids, work.num_logits_rows, state=state)
    if not proposal.parents:
        token_ids = [*chain, *proposal.token_ids]
        return SessionRows(token_ids, start, work.table.block_ids, work.num_logits_rows, state=state)
    return SessionRows(
        token_ids=[*chain, *proposal.token_ids],
        context_len=start,
        block_ids=work.table.block_ids,
        num_logits_rows=work.num_logits_rows,
        num_chain_rows=work.num_chain_rows,
        parents=[work.num_chain_rows + parent for parent in proposal.parents],
        state=state,
    )


def _state_rows(work: Work) -> StateRows | None:
    """The session's recurrent state; None for a model without recurrent layers."""
    state = work.session.state
    if state is None:
        return None
    if state.slot_out is None or state.position != work.session.num_computed:
        raise IntegrityError(f"a state at {state.position} for a forward from {work.session.num_computed} on")
    return StateRows(state.slot, state.kept_rows, state.slot_out, work.num_chain_rows)


def path_moves(work: Work, kept_nodes: Sequence[int], block_size: int) -> tuple[list[int], list[int]]:
    """Returns from and to which slots the KV rows of a tree's accepted path move, to be those of a chain."""
    first = work.session.num_computed + work.num_chain_rows
    moves = [(first + node, first + depth) for depth, node in enumerate(kept_nodes) if node != depth]
    sources = slots_of(work.table.block_ids, (source for source, _ in moves), block_size)
    return sources, slots_of(work.table.block_ids, (target for _, target in moves), block_size)


def keep_prompt_logprobs(work: Work, logits: NDArray[np.float32]) -> None:
    """Stores the prompt's log-probabilities, if requested.

    Row i gives the log-probability of prompt token i + 1; the first token has none.
    """
    session = work.session
    count = session.spec.sampling_params.num_prompt_logprobs
    if count is None or session.num_computed >= session.prompt_len or session.has_replied:
        return
    if not session.prompt_logprobs:
        session.prompt_logprobs.append(TokenLogprob(0.0, 0))
    for row in range(work.num_chain_rows):
        position = session.num_computed + row + 1
        if position < session.prompt_len:
            session.prompt_logprobs.append(token_logprob(logits[row], session.token_ids[position], count))
