"""The drafted chains of a batch of sessions, as flat tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.sampling_support.transforms import check_vector


@dataclass(frozen=True)
class ChainDrafts:
    """Session s owns the rows [row_starts[s], row_starts[s + 1]): its root, then one row per draft token.

    The root's row of logits follows the committed prefix, the row of draft token i follows that token. `token_ids` and
    the laws stand in the row of their own token; in root rows they are not read. A token without a law (a point mass)
    gets the law of itself alone: its id with count `law_total`.

    `row_starts` int32 [S + 1]; `token_ids` int64 [N]; `law_token_ids` int32 [N, K], different within a row where counts
    are above 0; `law_counts` int32 [N, K], 0 for padding; `block_rules` int32 [S], 1 for block, 0 for standard.
    """

    row_starts: torch.Tensor
    token_ids: torch.Tensor
    law_token_ids: torch.Tensor
    law_counts: torch.Tensor
    law_total: int
    block_rules: torch.Tensor

    @property
    def num_sessions(self) -> int:
        return int(self.row_starts.shape[0]) - 1

    def check(self, num_rows: int) -> None:
        """Raises KernelArgumentError unless shapes and dtypes are as above, with num_rows rows."""
        width = self.law_token_ids.shape[-1]
        check_vector("row_starts", self.row_starts, torch.int32, (self.num_sessions + 1,))
        check_vector("token_ids", self.token_ids, torch.int64, (num_rows,))
        check_vector("law_token_ids", self.law_token_ids, torch.int32, (num_rows, width))
        check_vector("law_counts", self.law_counts, torch.int32, (num_rows, width))
        check_vector("block_rules", self.block_rules, torch.int32, (self.num_sessions,))
