"""Exact mode: emit what the target samples with the shared noise, as far as the draft predicted it.

Every emitted token is coupled_sample(target law; key, index), a fixed function of the prefix, so the output does not
depend on the draft. For chains and trees; the proposal needs no law. Temperature 0 is the special case of a law with
one token in its support.
"""

from __future__ import annotations

from outrider.engine.sampling.coupling import coupled_sample
from outrider.shared.messages import Proposal
from outrider.verifier_service.acceptance.outcome import Acceptance, LawAt, agreed_path


def accept(law_at: LawAt, proposal: Proposal, *, stream_key: int) -> Acceptance:
    def token_after(node: int, num_accepted: int) -> int:
        return coupled_sample(law_at(node), stream_key, proposal.base_len + num_accepted)

    return agreed_path(proposal, token_after)
