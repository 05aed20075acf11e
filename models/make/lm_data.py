"""Batches of token ids from a memory-mapped corpus: a function of (seed, step), so a resumed run sees the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from outrider.training.errors import CorpusError


def load_token_ids(path: Path) -> npt.NDArray[np.uint16]:
    """Returns the token ids of one split, memory-mapped. Raises CorpusError when they do not exist."""
    if not path.exists():
        raise CorpusError(f"{path} is missing: run `python -m models.make.tokenizer` first")
    return np.memmap(path, dtype=np.uint16, mode="r")


class BlockSampler:
    """Cuts the corpus into blocks of `seq_len + 1` ids, reshuffled every epoch."""

    def __init__(self, token_ids: npt.NDArray[np.uint16], seq_len: int, seed: int) -> None:
        self.token_ids, self.seq_len, self.seed = token_ids, seq_len, seed
        self.num_blocks = (len(token_ids) - 1) // seq_len
        if self.num_blocks < 1:
            raise CorpusError(f"{len(token_ids)} tokens do not fill one sequence of {seq_len}")
        self._orders: dict[int, npt.NDArray[np.int64]] = {}

    def _block(self, position: int) -> int:
        epoch, place = divmod(position, self.num_blocks)
        if epoch not in self._orders:
            order = np.random.default_rng([self.seed, self.seq_len, epoch]).permutation(self.num_blocks)
            self._orders = {epoch - 1: self._orders.get(epoch - 1, order), epoch: order}
        return int(self._orders[epoch][place])

    def batch(self, step: int, batch_size: int) -> torch.Tensor:
        """Returns int64[batch_size, seq_len + 1]: inputs are `[:, :-1]`, labels `[:, 1:]`."""
        starts = [self._block(step * batch_size + row) * self.seq_len for row in range(batch_size)]
        rows = [self.token_ids[start : start + self.seq_len + 1].astype(np.int64) for start in starts]
        return torch.from_numpy(np.stack(rows))
