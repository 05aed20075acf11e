"""The target's hidden states of one session, as far as they have come and are still needed."""

from __future__ import annotations

import torch

from shared.errors import InvalidRequest
from shared.messages import HiddenStates

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class HiddenRows:
    """Rows [first, end) of absolute positions, without a gap. Row i is the target's state after token i."""

    def __init__(self) -> None:
        self.first = 0
        self._rows: torch.Tensor | None = None

    @property
    def end(self) -> int:
        return self.first + (0 if self._rows is None else self._rows.shape[0])

    def begin_at(self, position: int) -> None:
        """Rows before a position are not needed. Only for a session that holds none yet."""
        self.first = position

    def add(self, piece: HiddenStates, prompt_len: int) -> None:
        """`add_rows` of what has come over the wire."""
        position = prompt_len + piece.first_index
        if position < 0:
            raise InvalidRequest(
                f"hidden_states: row {piece.first_index} lies before the prompt", param="hidden_states"
            )
        if piece.num_rows == 0:
            return
        shape = (len(piece.layers), piece.num_rows, piece.width)
        flat = torch.frombuffer(bytearray(piece.data), dtype=_DTYPES[piece.dtype])
        self.add_rows(position, flat.view(shape).transpose(0, 1).reshape(piece.num_rows, -1))

    def add_rows(self, position: int, rows: torch.Tensor) -> None:
        """Takes up rows [N, layers * width], N > 0, by position: what is known already is overwritten. After a gap only
        the new rows count.

        Raises InvalidRequest when the rows have another width or dtype than those before.
        """
        known = self._rows
        if known is not None and (known.shape[1] != rows.shape[1] or known.dtype != rows.dtype):
            raise InvalidRequest(
                f"hidden_states: {rows.shape[1]} elements of {rows.dtype} a row, before it were {known.shape[1]} of "
                f"{known.dtype}",
                param="hidden_states",
            )
        if known is None or not self.first <= position <= self.end:
            self.first, self._rows = position, rows
        else:
            self._rows = torch.cat((known[: position - self.first], rows))

    def rows(self, start: int, end: int) -> torch.Tensor:
        """[end - start, layers * width]; the range must be there."""
        if self._rows is None or not self.first <= start <= end <= self.end:
            raise IndexError(f"hidden rows [{start}, {end}) of [{self.first}, {self.end})")
        return self._rows[start - self.first : end - self.first]

    def forget_before(self, position: int) -> None:
        """Drops rows that have been used."""
        if self._rows is not None and position > self.first:
            kept = self._rows[position - self.first :]
            self.first = max(position, self.end) if len(kept) == 0 else position
            # A copy, so that the memory of the dropped rows is free.
            self._rows = kept.clone() if len(kept) else None

    def cut_back(self, position: int) -> None:
        """Drops rows from a position on: the tokens they belong to have been taken back."""
        if self._rows is not None and position < self.end:
            self._rows = self._rows[: max(0, position - self.first)]
