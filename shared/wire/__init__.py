"""Protobuf in, plain values out, and back: the one place (with `rpc`) that knows the generated code.

A message that does not make sense raises InvalidRequest; whoever reads the stream ends that session, no other.
"""

from outrider.shared.wire.common import (
    hidden_from_wire,
    hidden_to_wire,
    logprob_to_wire,
    logprobs_from_wire,
    open_drafter,
    open_verifier,
    params_from_wire,
    params_to_wire,
    spec_from_wire,
)
from outrider.shared.wire.drafter import (
    draft_step_from_wire,
    draft_step_to_wire,
    drafter_info_from_wire,
    drafter_info_to_wire,
    proposal_reply_from_wire,
    proposal_reply_to_wire,
)
from outrider.shared.wire.fields import from_message, to_message
from outrider.shared.wire.proposals import proposal_from_wire, proposal_to_wire
from outrider.shared.wire.verifier import (
    commit_from_wire,
    commit_to_wire,
    verifier_info_from_wire,
    verifier_info_to_wire,
    verify_step_from_wire,
    verify_step_to_wire,
)

__all__ = [
    "commit_from_wire",
    "commit_to_wire",
    "draft_step_from_wire",
    "draft_step_to_wire",
    "drafter_info_from_wire",
    "drafter_info_to_wire",
    "from_message",
    "hidden_from_wire",
    "hidden_to_wire",
    "logprob_to_wire",
    "logprobs_from_wire",
    "open_drafter",
    "open_verifier",
    "params_from_wire",
    "params_to_wire",
    "proposal_from_wire",
    "proposal_reply_from_wire",
    "proposal_reply_to_wire",
    "proposal_to_wire",
    "spec_from_wire",
    "to_message",
    "verifier_info_from_wire",
    "verifier_info_to_wire",
    "verify_step_from_wire",
    "verify_step_to_wire",
]
