"""A session's share of a forward, and what its prompt rows are kept for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.batch import SessionRows
from engine.sampling import token_logprob
from shared.messages import TokenLogprob
from verifier_service.scheduler import Work


def session_rows(work: Work) -> SessionRows:
    """The rows that the scheduler has planned for one session."""
    session = work.session
    start = session.num_computed
    chain = session.token_ids[start : start + work.num_chain_rows]
    proposal = work.proposal
    if proposal is None:
        return SessionRows(chain, start, work.table.block_ids, work.num_logits_rows)
    if not proposal.parents:
        token_ids = [*chain, *proposal.token_ids]
        return SessionRows(token_ids, start, work.table.block_ids, work.num_logits_rows)
    return SessionRows(
        token_ids=[*chain, *proposal.token_ids],
        context_len=start,
        block_ids=work.table.block_ids,
        num_logits_rows=work.num_logits_rows,
        num_chain_rows=work.num_chain_rows,
        parents=[work.num_chain_rows + parent for parent in proposal.parents],
    )


def keep_prompt_logprobs(work: Work, logits: NDArray[np.float32]) -> None:
    """Row i of the prompt gives the log-probability of prompt token i + 1; the first token has none."""
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
