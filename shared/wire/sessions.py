"""Opening a session at either service."""

from __future__ import annotations

from outrider.shared import messages as m
from outrider.shared.errors import InvalidRequest
from outrider.shared.request_params import Speculation
from outrider.shared.wire.fields import from_message, to_message
from outrider.shared.wire.params import params_from_wire, write_params
from outrider.v1 import drafter_pb2 as drafter
from outrider.v1 import verifier_pb2 as verifier


def open_verifier(spec: m.SessionSpec) -> verifier.VerifierRequest:
    request = verifier.VerifierRequest()
    _write(request.open, spec, skipped="method")
    return request


def open_drafter(spec: m.SessionSpec) -> drafter.DrafterRequest:
    request = drafter.DrafterRequest()
    _write(request.open, spec, skipped="numerics")
    return request


def _write(
    message: verifier.OpenVerifierSession | drafter.OpenDrafterSession, spec: m.SessionSpec, *, skipped: str
) -> None:
    write_params(message.sampling_params, spec.sampling_params)
    to_message(message, spec, skipped=(skipped, "sampling_params"))


def spec_from_wire(message: verifier.OpenVerifierSession | drafter.OpenDrafterSession) -> m.SessionSpec:
    """Parses a session's spec. Raises InvalidRequest when the id, the prompt or the mode is missing."""
    if not message.session_id:
        raise InvalidRequest("open: session_id is empty", param="session_id")
    if not message.prompt_token_ids:
        raise InvalidRequest("open: prompt_token_ids is empty", param="prompt_token_ids")
    params = params_from_wire(message.sampling_params)
    params.validate()
    speculation = from_message(Speculation, message.speculation)
    speculation.validate()
    given = {"sampling_params": params, "speculation": speculation}
    return from_message(m.SessionSpec, message, skipped=given, **given)
