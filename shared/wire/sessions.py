"""Opening a session at either service."""

from __future__ import annotations

from typing import Any

from outrider.shared import messages as m
from outrider.shared.errors import InvalidRequest
from outrider.shared.request_params import Speculation
from outrider.shared.wire.fields import from_message, to_message
from outrider.shared.wire.params import MODE_FROM_WIRE, MODE_TO_WIRE, params_from_wire, write_params
from outrider.v1 import drafter_pb2 as drafter
from outrider.v1 import verifier_pb2 as verifier


def open_verifier(spec: m.SessionSpec) -> verifier.VerifierRequest:
    request = verifier.VerifierRequest(open=verifier.OpenVerifierSession(**_of_both(spec), numerics=spec.numerics))
    write_params(request.open.sampling_params, spec.sampling_params)
    to_message(request.open.speculation, spec.speculation)
    return request


def open_drafter(spec: m.SessionSpec) -> drafter.DrafterRequest:
    request = drafter.DrafterRequest(open=drafter.OpenDrafterSession(**_of_both(spec), method=spec.method))
    write_params(request.open.sampling_params, spec.sampling_params)
    to_message(request.open.speculation, spec.speculation)
    return request


def _of_both(spec: m.SessionSpec) -> dict[str, Any]:
    return {
        "session_id": spec.session_id,
        "epoch": spec.epoch,
        "prompt_token_ids": spec.prompt_token_ids,
        "committed_token_ids": spec.committed_token_ids,
        "mode": MODE_TO_WIRE[spec.mode],
        "stream_key": spec.stream_key,
        "cache_salt": spec.cache_salt,
        "predicted_token_ids": spec.predicted_token_ids,
    }


def spec_from_wire(message: verifier.OpenVerifierSession | drafter.OpenDrafterSession) -> m.SessionSpec:
    """Parses a session's spec. Raises InvalidRequest when the id, the prompt or the mode is missing."""
    if not message.session_id:
        raise InvalidRequest("open: session_id is empty", param="session_id")
    if not message.prompt_token_ids:
        raise InvalidRequest("open: prompt_token_ids is empty", param="prompt_token_ids")
    mode = MODE_FROM_WIRE.get(message.mode)
    if mode is None:
        raise InvalidRequest("open: mode must be EXACT or REJECTION", param="mode")
    params = params_from_wire(message.sampling_params)
    params.validate()
    speculation = from_message(Speculation, message.speculation)
    speculation.validate()
    return m.SessionSpec(
        session_id=message.session_id,
        epoch=message.epoch,
        prompt_token_ids=tuple(message.prompt_token_ids),
        committed_token_ids=tuple(message.committed_token_ids),
        sampling_params=params,
        speculation=speculation,
        mode=mode,
        stream_key=message.stream_key,
        cache_salt=message.cache_salt,
        predicted_token_ids=tuple(message.predicted_token_ids),
        method=message.method if isinstance(message, drafter.OpenDrafterSession) else "",
        numerics=_numerics_from_wire(message),
    )


def _numerics_from_wire(message: verifier.OpenVerifierSession | drafter.OpenDrafterSession) -> str | None:
    if isinstance(message, verifier.OpenVerifierSession) and message.HasField("numerics"):
        return message.numerics
    return None
