"""The drafted chains of a batch of sessions, as flat tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.sampling_support.transforms import check_vector


@dataclass(frozen=True)
class ChainDrafts:
    """Session s owns the rows [row_starts[s], row_starts[s + 1]): its root, then one row per draft token.

    The logits of the root row follow the committed prefix, those of a token's row follow that token. `token_ids` and
    laws belong to the token of their row; unused in root rows. A token drafted without a law has itself as a point
    mass: its id with count `law_total`.
    """

    row_starts: torch.Tensor  # int32 [S + 1]
    token_ids: torch.Tensor  # int64 [N]
    law_token_ids: torch.Tensor  # int32 [N, K]; distinct within a row where counts are above 0
    law_counts: torch.Tensor  # int32 [N, K]; 0: padding
    law_total: int
    block_rules: torch.Tensor  # int32 [S]; 1: block, 0: standard

    @property
    def num_sessions(self) -> int:
        return int(self.row_starts.shape[0]) - 1

    def check(self, num_rows: int) -> None:
        """Raises KernelArgumentError unless shapes and dtypes are as above with N = num_rows."""
        width = self.law_token_ids.shape[-1]
        check_vector("row_starts", self.row_starts, torch.int32, (self.num_sessions + 1,))
        check_vector("token_ids", self.token_ids, torch.int64, (num_rows,))
        check_vector("law_token_ids", self.law_token_ids, torch.int32, (num_rows, width))
        check_vector("law_counts", self.law_counts, torch.int32, (num_rows, width))
        check_vector("block_rules", self.block_rules, torch.int32, (self.num_sessions,))
