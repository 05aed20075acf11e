"""Maps logits over a head's vocabulary to the target's, on the host or in place on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.engine.sampling.laws import Row


class TargetVocabulary:
    """Maps a head's logits to the target's vocabulary.

    target_ids int64 [head vocabulary]: the target's id of each head id; None: identical ids.
    """

    def __init__(self, vocab_size: int, target_ids: torch.Tensor | None) -> None:
        self.vocab_size = vocab_size
        self._target_ids = None if target_ids is None else target_ids.cpu().numpy()
        # target_ids on the device of the last `spread`: nothing may be moved inside a captured graph.
        self._device_ids = target_ids

    def rows(self, logits: torch.Tensor) -> Sequence[Row]:
        """Maps logits [N, head vocabulary] -> float32 [N, vocab_size]; -inf for tokens the head does not have."""
        found: np.ndarray[tuple[int, int], np.dtype[np.float32]] = logits.float().cpu().numpy()
        if self._target_ids is None:
            return list(found)
        rows = np.full((len(found), self.vocab_size), -np.inf, dtype=np.float32)
        rows[:, self._target_ids] = found
        return list(rows)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Maps logits [N, head vocabulary] -> [N, vocab_size], same device and dtype; -inf as in `rows`."""
        if self._device_ids is None:
            return logits
        if self._device_ids.device != logits.device:
            self._device_ids = self._device_ids.to(logits.device)
        rows = logits.new_full((logits.shape[0], self.vocab_size), -torch.inf)
        return rows.index_copy_(1, self._device_ids, logits)
