"""Tokens drawn on the logits' device: a few launches per step; the host gets token ids instead of logits.

For sessions whose law is temperature, top-k, top-p and min-p alone. Exact mode draws every row with the shared noise.
Drafts without laws draw every row with noise of the session's own. Chains with laws go through accept_chains. Logits
are copied to the host for penalties, bias, bad words, grammars, log-probabilities and trees with laws. The path depends
only on the session's request and draft, so its output does not depend on the other sessions in the batch.
The kernels compute in float32, the host in float64: equal laws, other bits, like two kinds of device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.sampling.device_sampling import ChainDraft, RowFields, accept_chains, draw_rows
from outrider.engine.uploads import upload
from outrider.verifier_service.acceptance.outcome import Acceptance
from outrider.verifier_service.drawing_paths import (
    DrawingPath,
    depths_of,
    draw_rng,
    drawing_path,
    is_exact,
    shared_key_words,
)
from outrider.verifier_service.row_outputs import RowOutputs
from outrider.verifier_service.scheduler import Work


def device_outputs(plan: Sequence[Work], logits: torch.Tensor) -> list[RowOutputs]:
    """RowOutputs of each Work from logits [R, V] on a device; waits for the device."""
    paths = [drawing_path(work) for work in plan]
    starts = np.cumsum([0, *(work.num_logits_rows for work in plan)])
    rows = [range(start, end) for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]

    def of(path: DrawingPath) -> list[tuple[Work, range]]:
        return [(work, own_rows) for work, own_rows, taken in zip(plan, rows, paths, strict=True) if taken == path]

    drawn = _drawn(of(DrawingPath.DRAWN), logits)
    rejected = _rejected(of(DrawingPath.REJECTED), logits)
    copied_rows = [row for _, own_rows in of(DrawingPath.HOST) for row in own_rows]
    copied = iter(_rows_of(logits, copied_rows).float().cpu().numpy())
    outputs: list[RowOutputs] = []
    for work, own_rows, path in zip(plan, rows, paths, strict=True):
        if path == DrawingPath.DRAWN:
            outputs.append(RowOutputs(token_ids=drawn[own_rows.start : own_rows.stop]))
        elif path == DrawingPath.REJECTED:
            outputs.append(RowOutputs(acceptance=next(rejected)))
        else:
            own = [next(copied) for _ in range(work.num_logits_rows)]
            outputs.append(RowOutputs(np.stack(own)) if own else RowOutputs())
    if logits.is_cuda:  # where no token was drawn, nothing has waited yet, and the forward's time would look short
        torch.cuda.current_stream(logits.device).synchronize()
    return outputs


def _rows_of(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    if len(rows) == logits.shape[0]:
        return logits
    return logits[upload(np.array(rows, dtype=np.int64), logits.device)]


def _drawn(members: Sequence[tuple[Work, range]], logits: torch.Tensor) -> NDArray[np.int64]:
    """Returns int64 [R]: the target's token after each row of the members; argmaxes in all other rows."""
    if not members:
        return np.empty(0, dtype=np.int64)
    fields = RowFields(logits.shape[0])
    key_words = np.zeros((logits.shape[0], 2), dtype=np.uint32)
    for work, own_rows in members:
        depths = depths_of(work.proposal) if work.samples else []
        if not depths or work.session.spec.sampling_params.greedy:
            continue
        # The last rows are the committed prefix's and the nodes'; no token is drawn from the rows before them.
        rows = slice(own_rows.stop - len(depths), own_rows.stop)
        fields.set(rows, work.session.spec.sampling_params)
        key_words[rows] = _key_words(work, depths)
    return draw_rows(logits, fields, key_words)


def _key_words(work: Work, depths: Sequence[int]) -> NDArray[np.uint32]:
    """Returns uint32 [N, 2]: the shared noise of each row's output index, or fresh noise in rejection mode."""
    if is_exact(work):
        return shared_key_words(work, depths)
    return draw_rng(work).integers(0, 2**32, (len(depths), 2), dtype=np.uint32)


def _rejected(members: Sequence[tuple[Work, range]], logits: torch.Tensor) -> Iterator[Acceptance]:
    """Acceptances of the members' chains with laws, in order."""
    chains: list[ChainDraft] = []
    rows: list[int] = []
    for work, own_rows in members:
        proposal, rng = work.proposal, draw_rng(work)
        if proposal is None:
            raise ValueError("rejection sampling needs a proposal")
        num_rows = 1 + len(proposal.token_ids)
        params, by_block = work.session.spec.sampling_params, work.session.chain_rule == "block"
        uniforms, keys = rng.random(num_rows), rng.integers(0, 2**32, 2, dtype=np.uint32)
        chains.append(ChainDraft(params, proposal.token_ids, proposal.laws, by_block, uniforms, keys))
        rows.extend(range(own_rows.stop - num_rows, own_rows.stop))
    accepted = accept_chains(_rows_of(logits, rows), chains) if chains else []
    return (Acceptance(tuple(range(count)), final) for count, final in accepted)
