"""The draws of many chains as device tables, by step and session, and their results on the host.

Not here: the source of the logits (device_chains, and heads that give all depths at once), and the arithmetic
(kernels/coupled_sample, device_laws).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.sampling.chains import ChainDraws, DrawnToken
from outrider.engine.sampling.device_laws import draw_from_laws
from outrider.engine.sampling.device_sampling import RowFields
from outrider.engine.uploads import upload
from outrider.kernels.coupled_sample.triton import coupled_sample_with_shares
from outrider.kernels.sampling_support.transforms import Transforms
from outrider.shared.messages import LAW_SIZE, SparseLaw

NO_PLACE = -1  # law_places of a row that races


class DrawTables(NamedTuple):
    """The draws of R sessions in T steps. Padding rows and steps past a chain's end draw tokens that are never read."""

    transforms: Transforms  # [R]
    key_words: torch.Tensor  # int32 [T, R, 2]
    law_places: torch.Tensor  # int64 [T, R]; NO_PLACE: the row races

    @classmethod
    def of_chains(cls, chains: Sequence[ChainDraws], num_steps: int, num_rows: int, device: torch.device) -> DrawTables:
        """Makes the chains' tables; num_steps >= the tokens of every chain, num_rows >= the number of chains."""
        fields = RowFields(num_rows)
        key_words = np.zeros((num_steps, num_rows, 2), dtype=np.uint32)
        law_places = np.full((num_steps, num_rows), NO_PLACE, dtype=np.int64)
        for row, draws in enumerate(chains):
            fields.set(slice(row, row + 1), draws.params)
            key_words[: draws.num_tokens, row] = draws.key_words
            if draws.law_places is not None:
                law_places[: draws.num_tokens, row] = draws.law_places
        return cls(fields.to(device), upload(key_words.view(np.int32), device), upload(law_places, device))

    def load(self, other: DrawTables) -> None:
        """Overwrites these tables with others of the same sizes."""
        self.key_words.copy_(other.key_words)
        self.law_places.copy_(other.law_places)
        for mine, theirs in zip(self.transforms, other.transforms, strict=True):
            mine.copy_(theirs)


class Drawn(NamedTuple):
    """Drawn tokens, with shares and laws as in chains.DrawnToken."""

    tokens: torch.Tensor  # int64 [...]; -1: a row without a finite logit
    shares: torch.Tensor  # float32 [...]
    law_token_ids: torch.Tensor  # int32 [..., LAW_SIZE], or [..., 0] without laws
    law_counts: torch.Tensor  # as law_token_ids

    @classmethod
    def blank(cls, num_steps: int, num_rows: int, device: torch.device, *, with_laws: bool) -> Drawn:
        """Returns zeros for T steps of R rows."""

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((num_steps, num_rows, *shape), dtype=dtype, device=device)

        law_size = LAW_SIZE if with_laws else 0
        laws = [zeros(law_size, dtype=torch.int32) for _ in range(2)]
        return cls(zeros(dtype=torch.int64), zeros(dtype=torch.float32), *laws)

    @classmethod
    def of_steps(cls, steps: Sequence[Drawn]) -> Drawn:
        """Stacks one draw [R, ...] per step to [T, R, ...]."""
        return cls(*(torch.stack(parts) for parts in zip(*steps, strict=True)))


def any_laws(chains: Sequence[ChainDraws]) -> bool:
    return any(draws.law_places is not None for draws in chains)


def draw_rows(
    logits: torch.Tensor,
    transforms: Transforms,
    key_words: torch.Tensor,
    law_places: torch.Tensor,
    *,
    with_laws: bool,
) -> Drawn:
    """Draws one token per row of logits [R, V].

    A row is drawn from its law if with_laws and law_places [R] is not NO_PLACE, else by its race. Does not wait for the
    device. Raises KernelArgumentError.
    """
    tokens, shares = coupled_sample_with_shares(logits, transforms, key_words)
    if not with_laws:
        none = tokens.new_empty((len(tokens), 0), dtype=torch.int32)
        return Drawn(tokens, shares, none, none)
    laws = draw_from_laws(logits, transforms, law_places)
    has_law = law_places != NO_PLACE
    tokens, shares = torch.where(has_law, laws.tokens, tokens), torch.where(has_law, laws.shares, shares)
    return Drawn(tokens, shares, laws.law_token_ids, laws.law_counts)


def draw_at_once(logits: torch.Tensor, chains: Sequence[ChainDraws]) -> list[list[DrawnToken]]:
    """Draws chains whose logits are all known: [T, S, V], T >= the tokens of every chain."""
    num_steps, num_rows = max(draws.num_tokens for draws in chains), len(chains)
    tables = DrawTables.of_chains(chains, num_steps, num_rows, logits.device)
    drawn = draw_rows(
        logits[:num_steps].flatten(0, 1),
        Transforms(*(field.repeat(num_steps) for field in tables.transforms)),
        tables.key_words.flatten(0, 1),
        tables.law_places.flatten(),
        with_laws=any_laws(chains),
    )
    return chains_on_host(Drawn(*(part.view(num_steps, num_rows, *part.shape[1:]) for part in drawn)), chains)


def draw_steps(
    chains: Sequence[ChainDraws], step: Callable[[torch.Tensor | None, int], torch.Tensor], device: torch.device
) -> list[list[DrawnToken]]:
    """Draws chains token by token, without copies to the host in between.

    step: maps the tokens [S] drawn last (None before the first) and the depth -> logits [S, V]. Chains that have ended
    are still computed, and cut off at the end.
    """
    num_steps, with_laws = max(draws.num_tokens for draws in chains), any_laws(chains)
    tables = DrawTables.of_chains(chains, num_steps, len(chains), device)
    token_ids: torch.Tensor | None = None
    drawn = []
    for depth in range(num_steps):
        key_words, law_places = tables.key_words[depth], tables.law_places[depth]
        drawn.append(draw_rows(step(token_ids, depth), tables.transforms, key_words, law_places, with_laws=with_laws))
        token_ids = drawn[-1].tokens.clamp(min=0)
    return chains_on_host(Drawn.of_steps(drawn), chains)


def chains_on_host(drawn: Drawn, chains: Sequence[ChainDraws]) -> list[list[DrawnToken]]:
    """Copies the chains of a draw [T, R, ...] to the host. A chain ends before a row without a finite logit."""
    num_steps, num_rows = max(draws.num_tokens for draws in chains), len(chains)
    tokens, shares, law_token_ids, law_counts = (part[:num_steps, :num_rows].cpu().numpy() for part in drawn)
    finished: list[list[DrawnToken]] = []
    for row, draws in enumerate(chains):
        chain: list[DrawnToken] = []
        for step in range(draws.num_tokens):
            token_id, law = int(tokens[step, row]), None
            if token_id < 0:
                break
            if draws.law_places is not None:
                law = _sparse(law_token_ids[step, row], law_counts[step, row])
            chain.append(DrawnToken(token_id, float(shares[step, row]), law))
        finished.append(chain)
    return finished


def _sparse(token_ids: NDArray[np.int32], counts: NDArray[np.int32]) -> SparseLaw:
    has_mass = counts > 0
    return SparseLaw(tuple(token_ids[has_mass].tolist()), tuple(counts[has_mass].tolist()))
