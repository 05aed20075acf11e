"""Which rows of hidden states go out with a commit: the ones asked for and not sent yet, newest last.

Not here: keeping them (engine/hidden_store).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.hidden_store import HiddenStateStore
from shared.errors import InvalidRequest
from shared.messages import HiddenStates
from verifier_service.session import VerifierSession

# A longer piece goes out in parts, with the next commits: 16 MiB are 680 rows of three layers of 4,096 in bf16.
MAX_BYTES = 16 * 2**20


def keep_layers(store: HiddenStateStore, layers: Sequence[int], num_layers: int) -> None:
    """Begins to keep what a step asks for. Raises InvalidRequest on a layer that the model does not have."""
    for layer in layers:
        if not 0 <= layer <= num_layers:
            raise InvalidRequest(
                f"hidden_states: layer {layer} is asked for, this model has 0 to {num_layers}", param="hidden_states"
            )
    store.keep(layers)


def rows_to_send(
    session: VerifierSession, store: HiddenStateStore, block_size: int, *, max_bytes: int = MAX_BYTES
) -> HiddenStates | None:
    """The next rows for the session's step, None when it asked for none or all have been sent."""
    request = session.step.hidden_states if session.step is not None else None
    if request is None:
        return None
    start = max(session.prompt_len + request.first_index, session.hidden_sent_len)
    piece = read_rows(session, store, block_size, request.layers, start, max_bytes=max_bytes)
    if piece is not None:
        session.hidden_sent_len = session.prompt_len + piece.end
    return piece


def read_rows(
    session: VerifierSession,
    store: HiddenStateStore,
    block_size: int,
    layers: Sequence[int],
    start: int,
    *,
    max_bytes: int = MAX_BYTES,
) -> HiddenStates | None:
    """The rows from position `start` on that are there, as many as one piece may hold; None: there are none.

    Rows exist up to the last computed position, which is the last committed token but one.
    """
    if session.table is None:
        return None
    start = max(0, start)
    max_rows = max(1, max_bytes // (len(layers) * store.width * store.dtype.itemsize))
    positions = range(start, session.num_computed)
    block_ids = session.table.block_ids
    slots = [block_ids[position // block_size] * block_size + position % block_size for position in positions]
    num_missing = store.num_missing(layers, slots)
    start, slots = start + num_missing, slots[num_missing : num_missing + max_rows]
    if not slots:
        return None
    rows = store.read(layers, slots)
    return HiddenStates(
        first_index=start - session.prompt_len,
        layers=tuple(layers),
        num_rows=len(slots),
        width=store.width,
        dtype=str(store.dtype).removeprefix("torch."),
        data=rows.contiguous().view(torch.uint8).cpu().numpy().tobytes(),
    )
