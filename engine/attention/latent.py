"""Attention over latents: the paged cache keeps the latents that all heads' keys and values are computed from.

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) computes a head's key from a latent c that all
heads share, k = (W_k c, r) with a rotated part r, and its value as W_v c. So a head's scores are those of the query
(W_k^T q, its rotated part) against the one key (c, r), and its output is W_v times the weighted mean of c: the kernel
sees one key/value head whose value is the first part of its key.
Not here: in which modules that is done, and its proof (model/latent_attention).
"""

from __future__ import annotations

import torch

from outrider.kernels.linear.row_invariant import row_invariant_linears

# attribute of those attention modules of transformers whose layer caches latents
LATENT_HEADS = "latent_heads"


class LatentHeads(torch.nn.Module):
    """Holds W_k and W_v of every head, packed: H heads, latents of L elements, Dn of a key from them, Dv values.

    The products are row-invariant linears, one per head and half.
    """

    def __init__(self, weight: torch.Tensor, key_dim: int, value_dim: int, backend: str) -> None:
        """Packs weight [H * (Dn + Dv), L]: for each head first W_k, then W_v. backend: as in row_kernels.RowKernels."""
        super().__init__()
        self.key_dim, self.value_dim, self.latent_dim = key_dim, value_dim, weight.shape[1]
        heads = weight.reshape(-1, key_dim + value_dim, self.latent_dim)
        self._absorb = row_invariant_linears(heads[:, :key_dim].transpose(1, 2), backend)
        self._expand = row_invariant_linears(heads[:, key_dim:], backend)

    def as_one_head(self, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Replaces transformers' `expand_kv`: latent [1, 1, T, L], rotated [1, 1, T, R] -> key [1, 1, T, L + R], and
        the value, a view of its first L elements."""
        key = torch.cat((latent, rotated), dim=-1)
        return key, key[..., : self.latent_dim]

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Maps query [1, H, T, Dn + R] -> [1, H, T, L + R], to be scored against keys of `as_one_head`."""
        own, rotated = query[0, :, :, : self.key_dim], query[0, :, :, self.key_dim :]
        absorbed = query.new_empty((query.shape[2], query.shape[1], self.latent_dim + rotated.shape[2]))
        by_head = absorbed.transpose(0, 1)
        by_head[..., self.latent_dim :] = rotated
        with torch._C.DisableTorchFunction():  # for row_invariant_functions there is nothing left to do
            self._absorb(own, by_head[..., : self.latent_dim])
        return by_head[None]

    def expand(self, attended: torch.Tensor) -> torch.Tensor:
        """Maps attended [1, T, H, L], weighted means of latents, to the heads' outputs [1, T, H, Dv]."""
        expanded = attended.new_empty((*attended.shape[1:3], self.value_dim))
        with torch._C.DisableTorchFunction():
            self._expand(attended[0].transpose(0, 1), expanded.transpose(0, 1))
        return expanded[None]
