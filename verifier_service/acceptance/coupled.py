"""Exact mode: emit what the target samples with the shared noise, as far as the draft predicted it.

Every emitted token is coupled_sample(target law; key, index), a fixed function of the prefix, so the output does not
depend on the draft. For chains and trees; the proposal needs no law. Temperature 0 is the special case of a law with
one token in its support.
"""

from __future__ import annotations

from outrider.engine.sampling.coupling import coupled_sample
from outrider.shared.messages import Proposal
from outrider.verifier_service.acceptance.outcome import ROOT, Acceptance, LawAt, children_of


def accept(law_at: LawAt, proposal: Proposal, *, stream_key: int) -> Acceptance:
    children = children_of(proposal)
    node = ROOT
    accepted: list[int] = []
    while True:
        token = coupled_sample(law_at(node), stream_key, proposal.base_len + len(accepted))
        child = next((child for child in children.get(node, ()) if proposal.token_ids[child] == token), None)
        if child is None:
            return Acceptance(tuple(accepted), token)
        node = child
        accepted.append(child)
