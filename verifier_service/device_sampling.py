"""Tokens drawn where the logits are: a few launches for all rows of a step, token ids instead of logits to the host.

For sessions whose law is temperature, top-k, top-p and min-p alone. Exact mode draws every row with the shared noise,
drafts without a law draw every row with noise of the session's own, chains with laws go through rejection_sample. What
looks at other tokens (penalties, bias, bad words, grammars), log-probabilities, and trees with laws have their rows of
logits copied to the host instead. Which way a session goes depends on its request and its drafts alone, so its output
does not change with its company.
The kernels compute in float32, the host in float64: equal laws, other bits, like any two kinds of device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.coupling import index_key
from engine.device_sampling import ChainDraft, RowFields, accept_chains, draw_rows
from shared.messages import Proposal
from shared.sampling_params import SpeculationMode
from verifier_service.acceptance.outcome import Acceptance
from verifier_service.round import acceptance_rng
from verifier_service.row_outputs import RowOutputs
from verifier_service.scheduler import Work

_HOST, _DRAWN, _REJECTED = "host", "drawn", "rejected"


def device_outputs(plan: Sequence[Work], logits: torch.Tensor) -> list[RowOutputs]:
    """For each piece of work what it needs of logits [R, V] on a device; returns when the device is done."""
    ways = [_way(work) for work in plan]
    starts = np.cumsum([0, *(work.num_logits_rows for work in plan)])
    rows = [range(start, end) for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]

    def of(way: str) -> list[tuple[Work, range]]:
        return [(work, places) for work, places, found in zip(plan, rows, ways, strict=True) if found == way]

    drawn = _drawn(of(_DRAWN), logits)
    rejected = _rejected(of(_REJECTED), logits)
    copied_rows = [row for _, places in of(_HOST) for row in places]
    copied = iter(_rows_of(logits, copied_rows).float().cpu().numpy())
    outputs: list[RowOutputs] = []
    for work, places, way in zip(plan, rows, ways, strict=True):
        if way == _DRAWN:
            outputs.append(RowOutputs(token_ids=drawn[places.start : places.stop]))
        elif way == _REJECTED:
            outputs.append(RowOutputs(acceptance=next(rejected)))
        else:
            own = [next(copied) for _ in range(work.num_logits_rows)]
            outputs.append(RowOutputs(np.stack(own)) if own else RowOutputs())
    return outputs


def _way(work: Work) -> str:
    session, params = work.session, work.session.spec.sampling_params
    if not session.processor.is_plain or params.num_logprobs is not None or params.num_prompt_logprobs is not None:
        return _HOST
    if _is_exact(work) or work.proposal is None or not work.proposal.laws:
        return _DRAWN
    return _HOST if work.proposal.parents else _REJECTED


def _is_exact(work: Work) -> bool:
    return work.session.spec.mode is SpeculationMode.EXACT or work.session.processor.is_plain_argmax


def _rows_of(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    if len(rows) == logits.shape[0]:
        return logits
    return logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]


def _drawn(members: Sequence[tuple[Work, range]], logits: torch.Tensor) -> NDArray[np.int64]:
    """int64 [R]: what the target draws after every row of the members; rows of others hold argmaxes."""
    if not members:
        return np.empty(0, dtype=np.int64)
    fields = RowFields(logits.shape[0])
    key_words = np.zeros((logits.shape[0], 2), dtype=np.uint32)
    for work, places in members:
        depths = _depths(work.proposal) if work.samples else []
        if not depths or work.session.spec.sampling_params.greedy:
            continue
        # The last rows are the committed prefix's and the nodes'; those before them are never drawn from.
        rows = slice(places.stop - len(depths), places.stop)
        fields.set(rows, work.session.spec.sampling_params)
        key_words[rows] = _key_words(work, depths)
    return draw_rows(logits, fields, key_words)


def _key_words(work: Work, depths: Sequence[int]) -> NDArray[np.uint32]:
    """uint32 [N, 2]: the shared noise of each row's output index, or fresh noise in rejection mode."""
    session = work.session
    if _is_exact(work):
        keys = [index_key(session.spec.stream_key, session.committed_len + depth) for depth in depths]
        return np.array(keys, dtype=np.uint32)
    return _rng(work).integers(0, 2**32, (len(depths), 2), dtype=np.uint32)


def _rng(work: Work) -> np.random.Generator:
    return acceptance_rng(work.session.spec.stream_key, work.session.spec.epoch, work.session.committed_len)


def _depths(proposal: Proposal | None) -> list[int]:
    """How many draft tokens stand between the committed prefix and what each row's token is drawn for."""
    depths = [0]
    if proposal is not None:
        for parent in proposal.parents or range(-1, len(proposal.token_ids) - 1):
            depths.append(depths[parent + 1] + 1)
    return depths


def _rejected(members: Sequence[tuple[Work, range]], logits: torch.Tensor) -> Iterator[Acceptance]:
    """What the rejection rules make of chains with laws, in the order of the members."""
    chains: list[ChainDraft] = []
    rows: list[int] = []
    for work, places in members:
        proposal, rng = work.proposal, _rng(work)
        if proposal is None:
            raise ValueError("only a proposal can be accepted or rejected")
        num_rows = 1 + len(proposal.token_ids)
        params, by_block = work.session.spec.sampling_params, work.session.chain_rule == "block"
        uniforms, keys = rng.random(num_rows), rng.integers(0, 2**32, 2, dtype=np.uint32)
        chains.append(ChainDraft(params, proposal.token_ids, proposal.laws, by_block, uniforms, keys))
        rows.extend(range(places.stop - num_rows, places.stop))
    accepted = accept_chains(_rows_of(logits, rows), chains) if chains else []
    return (Acceptance(tuple(range(count)), final) for count, final in accepted)
