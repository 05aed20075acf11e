"""P-EAGLE drafts (arXiv:2602.01469): an EAGLE-3 head that gives all tokens of a draft in one forward.

The rows of committed tokens are EAGLE-3's. After them, rows of a mask token and a learned hidden state stand in for the
tokens and features that are not known yet: the n-th of them predicts the token n places further. So no token of a draft
sees those before it, and a tree takes no further forward. The next round overwrites the masks' keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.drafting.growth.draft import Draft
from outrider.drafting.methods.eagle import EagleNet
from outrider.engine.attention.batch import SessionRows
from outrider.engine.sampling.laws import Row


class ParallelEagleNet(EagleNet):
    """Implements drafting.methods.net.DraftNet over an EAGLE-3 head with a mask token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        head: Any = self._paged.head
        self._mask_token_id = int(head.config.mask_token_id)
        with torch.inference_mode():
            self._mask_feature = head.fuse(head.mask_hidden[None])
        # Outputs of the current proposal: [tokens, H] per session.
        self._outputs: dict[int, torch.Tensor] = {}

    def logits(self, drafts: Sequence[Draft]) -> list[Sequence[Row]]:
        served = self._begin(drafts)
        fresh = [draft for draft in served if not draft.nodes]
        if fresh:
            self._run(fresh)
        if not served:
            return [() for _ in drafts]
        outputs = torch.stack([self._outputs[id(draft.session)][draft.depth] for draft in served])
        rows = zip(served, self._vocabulary.rows(self._logits(outputs)), strict=True)
        answers = {id(draft): [row] * len(draft.frontier) for draft, row in rows}
        return [answers.get(id(draft), ()) for draft in drafts]

    def _begin(self, drafts: Sequence[Draft]) -> list[Draft]:
        return self._rows_of.begin(
            drafts, [draft.max_depth for draft in drafts]
        )  # a mask for each depth, tree or chain

    def _run(self, drafts: Sequence[Draft]) -> None:
        rows, features = [], []
        for draft in drafts:
            session, cache = draft.session, self._rows_of.of(draft.session)
            committed, num_masks = session.token_ids[cache.end + 1 :], draft.max_depth - 1
            token_ids = [*committed, *[self._mask_token_id] * num_masks]
            rows.append(SessionRows(token_ids, cache.num_rows, cache.table.block_ids, num_logits_rows=num_masks + 1))
            features.append(self._fused([self._rows_of.states(session, cache.end, len(session.token_ids) - 1)]))
            features.append(self._mask_feature.expand(num_masks, -1))
        outputs = torch.split(self._paged.forward(rows, torch.cat(features)), [len(part.token_ids) for part in rows])
        for draft, output in zip(drafts, outputs, strict=True):
            self._outputs[id(draft.session)] = output[-draft.max_depth :]
            self._rows_of.keep(draft.session, len(draft.session.token_ids) - 1)

    def close(self, session: Any) -> None:
        self._outputs.pop(id(session), None)
        super().close(session)
