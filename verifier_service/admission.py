"""Checks that a session must pass before it is opened, and a proposal before it is verified."""

from __future__ import annotations

from outrider.engine.certificate import Certificate
from outrider.engine.sampling.permitted import PermittedTokens
from outrider.shared.errors import ExactModeRefused, InvalidRequest
from outrider.shared.messages import Proposal, SessionSpec
from outrider.shared.sampling_params import SpeculationMode


def check_spec(spec: SessionSpec, vocab_size: int, max_model_len: int, capacity: int, certificate: Certificate) -> None:
    """Checks a session's spec. capacity: positions of the whole KV cache.

    Raises InvalidRequest with the field's name, or ExactModeRefused.
    """
    spec.sampling_params.validate(vocab_size)
    lists = {
        "prompt": spec.prompt_token_ids,
        "committed": spec.committed_token_ids,
        "prediction": spec.predicted_token_ids,
    }
    for name, token_ids in lists.items():
        if token_ids and not (0 <= min(token_ids) and max(token_ids) < vocab_size):
            raise InvalidRequest(f"{name} has a token id outside the vocabulary [0, {vocab_size})", param=name)
    length = len(spec.prompt_token_ids) + len(spec.committed_token_ids)
    if length >= max_model_len:
        raise InvalidRequest(
            f"{length} tokens leave no room for output in this model's context of {max_model_len}", param="prompt"
        )
    longest = min(len(spec.prompt_token_ids) + spec.sampling_params.max_tokens, max_model_len)
    if longest > capacity:
        raise InvalidRequest(
            f"prompt and max_tokens need {longest} positions, the whole KV cache has {capacity}",
            param="max_tokens",
        )
    if spec.mode is SpeculationMode.EXACT and not certificate.holds:
        raise ExactModeRefused(
            f"exact mode is not available: a row's bits depend on its batch in {certificate.failing_operation}; "
            "request speculation.mode=rejection",
            param="speculation.mode",
        )


def check_start(spec: SessionSpec, permitted: PermittedTokens, vocab_size: int) -> None:
    """Raises NoTokenPermitted if no output can begin. An output that has begun ends before a dead end (round.py)."""
    if not spec.committed_token_ids and permitted.can_run_out:
        permitted.mask((), vocab_size)


def check_proposal(proposal: Proposal, vocab_size: int) -> None:
    """Raises InvalidRequest for a token id outside the vocabulary."""
    for token_ids in (proposal.token_ids, *(law.token_ids for law in proposal.laws)):
        if token_ids and not (0 <= min(token_ids) and max(token_ids) < vocab_size):
            raise InvalidRequest(f"proposal has a token id outside the vocabulary [0, {vocab_size})", param="proposal")
