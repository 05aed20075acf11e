"""Compiled acceptance and sampling on the CPU, where the logits are: the counterpart of device_sampling.

Not here: whose rows they are and the randomness (verifier_service), the arithmetic (kernels/rejection_sample/cpu), and
the same decisions in numpy, row by row (laws, verifier_service/acceptance).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.shared.messages import LAW_TOTAL, SparseLaw
from outrider.shared.sampling_params import SamplingParams


@dataclass(frozen=True)
class HostDraft:
    """One session's draft and its randomness. parents: of a tree; (): a chain. laws: of a chain; (): none.

    key_words: uint32 [1 + tokens, 2], each row's shared noise; None: `uniforms` (2 * tokens + 2 of them) are used in
    order instead. by_block: block verification of a chain with laws, else token by token.
    """

    params: SamplingParams
    first_row: int
    token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    laws: Sequence[SparseLaw] = ()
    key_words: NDArray[np.uint32] | None = None
    uniforms: NDArray[np.float64] | None = None
    by_block: bool = False


@functools.cache
def compiled_acceptance() -> Callable[[torch.Tensor, Sequence[HostDraft]], list[tuple[tuple[int, ...], int]]] | None:
    """Returns a function from logits and drafts to each draft's accepted nodes and the token after them.

    Logits are float32 [R, V]: row first_row follows the committed prefix, row first_row + 1 + i node i. The token is -1
    if a row has no finite logit. Compiles (seconds the first time); None without numba.
    """
    try:
        from outrider.kernels.rejection_sample import cpu
    except ImportError:
        return None

    def accept(logits: torch.Tensor, drafts: Sequence[HostDraft]) -> list[tuple[tuple[int, ...], int]]:
        return cpu.accept_sessions(logits, [_described(draft, cpu) for draft in drafts], torch.get_num_threads())

    accept(torch.zeros(1, 1), [HostDraft(SamplingParams(temperature=1.0), 0, uniforms=np.zeros(2))])
    return accept


def _described(draft: HostDraft, cpu: Any) -> Any:
    """Converts a draft to the kernel's type."""
    rule = cpu.RACE if draft.key_words is not None else cpu.QUANTILE
    if draft.key_words is None and draft.laws:
        rule = cpu.BLOCK if draft.by_block else cpu.STANDARD
    params = draft.params
    return cpu.SessionDrafts(
        rule,
        draft.first_row,
        (params.temperature, params.top_k, params.top_p, params.min_p),
        tuple(draft.token_ids),
        tuple(draft.parents),
        draft.key_words,
        draft.uniforms,
        tuple(
            (np.asarray(law.token_ids, np.int64), np.asarray(law.counts, np.float64) / LAW_TOTAL) for law in draft.laws
        ),
    )
