"""The drafter's messages."""

from __future__ import annotations

from outrider.shared import messages as m
from outrider.shared.errors import InvalidRequest
from outrider.shared.wire.common import (
    hidden_from_wire,
    hidden_to_wire,
    timings_from_wire,
    timings_to_wire,
)
from outrider.shared.wire.fields import from_message, to_message
from outrider.shared.wire.proposals import proposal_from_wire, proposal_to_wire
from outrider.v1 import drafter_pb2 as drafter


def draft_step_to_wire(step: m.DraftStep) -> drafter.DrafterRequest:
    return drafter.DrafterRequest(
        step=drafter.DraftStep(
            epoch=step.epoch,
            base_len=step.base_len,
            committed_token_ids=step.committed_token_ids,
            num_draft_tokens=step.num_draft_tokens,
            hidden_states=[hidden_to_wire(piece) for piece in step.hidden_states],
            max_tree_nodes=step.max_tree_nodes,
            max_branches=step.max_branches,
        )
    )


def draft_step_from_wire(message: drafter.DraftStep) -> m.DraftStep:
    if message.base_len < 0 or message.num_draft_tokens < 0:
        raise InvalidRequest("step: base_len and num_draft_tokens must not be negative", param="base_len")
    return m.DraftStep(
        epoch=message.epoch,
        base_len=message.base_len,
        committed_token_ids=tuple(message.committed_token_ids),
        num_draft_tokens=message.num_draft_tokens,
        hidden_states=tuple(hidden_from_wire(piece) for piece in message.hidden_states),
        max_tree_nodes=message.max_tree_nodes,
        max_branches=message.max_branches,
    )


def proposal_reply_to_wire(reply: m.ProposalReply) -> drafter.DrafterReply:
    return drafter.DrafterReply(
        proposal=drafter.ProposalReply(
            epoch=reply.epoch,
            proposal=proposal_to_wire(reply.proposal),
            timings=timings_to_wire(reply.timings),
            missing_hidden_from=reply.missing_hidden_from,
        )
    )


def proposal_reply_from_wire(message: drafter.ProposalReply) -> m.ProposalReply:
    return m.ProposalReply(
        epoch=message.epoch,
        proposal=proposal_from_wire(message.proposal),
        timings=timings_from_wire(message.timings),
        missing_hidden_from=message.missing_hidden_from if message.HasField("missing_hidden_from") else None,
    )


def drafter_info_to_wire(info: m.DrafterInfo) -> drafter.DrafterInfo:
    return to_message(drafter.DrafterInfo(), info)


def drafter_info_from_wire(message: drafter.DrafterInfo) -> m.DrafterInfo:
    return from_message(m.DrafterInfo, message)
