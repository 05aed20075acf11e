"""Selects the sessions whose tokens kernels draw, from all rows' logits together, and the numbers they draw with.

Not here: drawing (host_sampling, device_sampling), and deciding on the host, row by row (round).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.engine.sampling.coupling import index_key
from outrider.shared.messages import Proposal
from outrider.shared.sampling_params import SpeculationMode
from outrider.verifier_service.round import acceptance_rng
from outrider.verifier_service.scheduler import Work


class DrawingPath(enum.Enum):
    """The way in which a session's tokens are drawn.

    HOST: by round, from the logits: penalties, bias, bad words, grammars, log-probabilities, trees with laws.
    DRAWN: a token of each row. REJECTED: by the rule of a chain with laws.
    It depends only on the session's request and draft, so its output does not depend on the other sessions."""

    HOST = "host"
    DRAWN = "drawn"
    REJECTED = "rejected"


def drawing_path(work: Work) -> DrawingPath:
    session, params = work.session, work.session.spec.sampling_params
    if not session.processor.is_plain or params.num_logprobs is not None or params.num_prompt_logprobs is not None:
        return DrawingPath.HOST
    if is_exact(work) or work.proposal is None or not work.proposal.laws:
        return DrawingPath.DRAWN
    return DrawingPath.HOST if work.proposal.parents else DrawingPath.REJECTED


def is_exact(work: Work) -> bool:
    return work.session.spec.mode is SpeculationMode.EXACT or work.session.processor.is_plain_argmax


def draw_rng(work: Work) -> np.random.Generator:
    return acceptance_rng(work.session.spec.stream_key, work.session.spec.epoch, work.session.committed_len)


def depths_of(proposal: Proposal | None) -> list[int]:
    """Returns for each row the number of draft tokens between the committed prefix and the token drawn from the row."""
    depths = [0]
    if proposal is not None:
        for parent in proposal.parents or range(-1, len(proposal.token_ids) - 1):
            depths.append(depths[parent + 1] + 1)
    return depths


def shared_key_words(work: Work, depths: Sequence[int]) -> NDArray[np.uint32]:
    """Returns uint32 [N, 2]: the shared noise of each row's output index."""
    session = work.session
    keys = [index_key(session.spec.stream_key, session.committed_len + depth) for depth in depths]
    return np.array(keys, dtype=np.uint32)
