"""Proposals: what a drafter guesses, checked for what the acceptance rules stand on."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.shared import messages as m
from outrider.shared.errors import InvalidRequest
from outrider.v1 import common_pb2 as common


def proposal_to_wire(proposal: m.Proposal) -> common.Proposal:
    return common.Proposal(
        base_len=proposal.base_len,
        token_ids=proposal.token_ids,
        parents=proposal.parents,
        laws=[common.SparseLaw(token_ids=law.token_ids, counts=law.counts) for law in proposal.laws],
        law_total=m.LAW_TOTAL if proposal.laws else 0,
        confidence=proposal.confidence,
        method=proposal.method,
    )


def proposal_from_wire(message: common.Proposal) -> m.Proposal:
    """Parses a proposal. Raises InvalidRequest when parents, laws or confidence do not fit the tokens."""
    num_tokens = len(message.token_ids)
    for name, values in (
        ("parents", message.parents),
        ("laws", message.laws),
        ("confidence", message.confidence),
    ):
        if len(values) not in (0, num_tokens):
            raise InvalidRequest(f"proposal: {len(values)} {name} for {num_tokens} tokens", param=name)
    for node, parent in enumerate(message.parents):
        if not -1 <= parent < node:
            raise InvalidRequest(f"proposal: node {node} has parent {parent}", param="parents")
    laws = tuple(_law_from_wire(law, message.law_total) for law in message.laws)
    for token_id, law in zip(message.token_ids, laws, strict=False):
        if token_id not in law.token_ids:
            raise InvalidRequest(f"proposal: token {token_id} has no mass in its own law", param="laws")
    if laws and message.parents:
        _check_siblings(message, laws)
    return m.Proposal(
        base_len=message.base_len,
        token_ids=tuple(message.token_ids),
        method=message.method,
        parents=tuple(message.parents),
        laws=laws,
        confidence=message.confidence,
    )


def _check_siblings(message: common.Proposal, laws: Sequence[m.SparseLaw]) -> None:
    """Children of one node are drawn without replacement from one law: what the tree rule stands on."""
    law_of_parent: dict[int, m.SparseLaw] = {}
    seen: set[tuple[int, int]] = set()
    for token_id, parent, law in zip(message.token_ids, message.parents, laws, strict=True):
        if law_of_parent.setdefault(parent, law) != law:
            raise InvalidRequest(f"proposal: the children of node {parent} have different laws", param="laws")
        if (parent, token_id) in seen:
            raise InvalidRequest(f"proposal: node {parent} has token {token_id} as a child twice", param="parents")
        seen.add((parent, token_id))


def _law_from_wire(law: common.SparseLaw, law_total: int) -> m.SparseLaw:
    if law_total != m.LAW_TOTAL:
        raise InvalidRequest(f"proposal: law_total is {law_total}, not {m.LAW_TOTAL}", param="law_total")
    if len(law.token_ids) != len(law.counts) or sum(law.counts) != law_total:
        raise InvalidRequest("proposal: a law's counts do not sum to law_total", param="laws")
    if len(set(law.token_ids)) != len(law.token_ids) or 0 in law.counts:
        raise InvalidRequest("proposal: a law names a token twice or with no mass", param="laws")
    return m.SparseLaw(tuple(law.token_ids), tuple(law.counts))
