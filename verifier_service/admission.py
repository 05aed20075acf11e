"""What a session must satisfy before it is opened."""

from __future__ import annotations

from engine.certificate import Certificate
from shared.errors import ExactModeRefused, InvalidRequest
from shared.messages import SessionSpec
from shared.sampling_params import SpeculationMode


def check_spec(spec: SessionSpec, vocab_size: int, max_model_len: int, capacity: int, certificate: Certificate) -> None:
    """capacity: positions of the whole KV cache. Raises InvalidRequest that names the field, or ExactModeRefused."""
    spec.sampling_params.validate(vocab_size)
    for name, token_ids in (("prompt", spec.prompt_token_ids), ("committed", spec.committed_token_ids)):
        if token_ids and not (0 <= min(token_ids) and max(token_ids) < vocab_size):
            raise InvalidRequest(f"{name} holds a token id outside the vocabulary [0, {vocab_size})", param=name)
    length = len(spec.prompt_token_ids) + len(spec.committed_token_ids)
    if length >= max_model_len:
        raise InvalidRequest(f"{length} tokens, but the context of this model ends at {max_model_len}", param="prompt")
    longest = min(len(spec.prompt_token_ids) + spec.sampling_params.max_tokens, max_model_len)
    if longest > capacity:
        raise InvalidRequest(
            f"prompt and max_tokens need {longest} positions, the KV cache holds {capacity} in all",
            param="max_tokens",
        )
    if spec.mode is SpeculationMode.EXACT and not certificate.holds:
        raise ExactModeRefused(
            f"exact mode is not available: {certificate.failing_operation} gives a row other bits in another "
            "batch; ask for speculation.mode=rejection",
            param="speculation.mode",
        )
