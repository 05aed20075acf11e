"""Acceptances computed from a CPU's logits, compiled and on all threads, for sessions with plain laws.

Law, noise and random numbers are those of round, which decides the other sessions row by row: so are the tokens, but
for roundings of sums in float64. A session's rows beyond its decision are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.engine.sampling.host_sampling import HostDraft, compiled_acceptance
from outrider.verifier_service.acceptance.outcome import Acceptance
from outrider.verifier_service.drawing_paths import (
    DrawingPath,
    depths_of,
    draw_rng,
    drawing_path,
    is_exact,
    shared_key_words,
)
from outrider.verifier_service.row_outputs import RowOutputs, host_outputs
from outrider.verifier_service.scheduler import Work


def drawn_outputs(plan: Sequence[Work], logits: torch.Tensor) -> list[RowOutputs]:
    """RowOutputs of each Work from logits [R, V] on the CPU: acceptances, or logits where round decides."""
    accept, outputs = compiled_acceptance(), host_outputs(plan, logits)
    if accept is None:
        return outputs
    drafts: dict[int, HostDraft] = {}
    end = 0
    for index, work in enumerate(plan):
        end += work.num_logits_rows
        is_drawn = work.samples and not work.session.spec.sampling_params.greedy
        if is_drawn and drawing_path(work) is not DrawingPath.HOST:
            drafts[index] = _draft(work, end)
    if drafts:
        for index, (nodes, token) in zip(drafts, accept(logits.float(), list(drafts.values())), strict=True):
            outputs[index] = RowOutputs(acceptance=Acceptance(nodes, token))
    return outputs


def _draft(work: Work, end: int) -> HostDraft:
    """Describes a session's draft. end: of its rows; the last ones are the committed prefix's and the nodes'."""
    session, proposal = work.session, work.proposal
    params, by_block = session.spec.sampling_params, session.chain_rule == "block"
    token_ids, parents = ((), ()) if proposal is None else (proposal.token_ids, proposal.parents)
    first_row = end - 1 - len(token_ids)
    if is_exact(work):
        return HostDraft(params, first_row, token_ids, parents, key_words=shared_key_words(work, depths_of(proposal)))
    laws = () if proposal is None else proposal.laws
    uniforms = draw_rng(work).random(2 * len(token_ids) + 2)
    return HostDraft(params, first_row, token_ids, parents, laws, uniforms=uniforms, by_block=by_block)
