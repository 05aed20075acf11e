"""The target's hidden states of one session: those received, and those still needed."""

from __future__ import annotations

import torch

from outrider.shared.errors import InvalidRequest
from outrider.shared.messages import HiddenStates

# rows; that a session's memory may hold though they are dropped
_MOST_DROPPED = 64
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class HiddenRows:
    """Holds rows [first, end) of absolute positions, contiguous. Row i is the target's state after token i."""

    def __init__(self) -> None:
        self.first = 0
        self._rows: torch.Tensor | None = None

    @property
    def end(self) -> int:
        return self.first + (0 if self._rows is None else self._rows.shape[0])

    def begin_at(self, position: int) -> None:
        """Sets the first position whose row is needed. Only for a session without rows."""
        self.first = position

    def add(self, piece: HiddenStates, prompt_len: int) -> None:
        """Runs `add_rows` for a message from the wire."""
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
        """Stores rows [N, layers * width], N > 0, by position, overwriting known ones.

        After a gap only the new rows remain. Raises InvalidRequest when the rows differ from earlier ones in width or
        dtype.
        """
        known = self._rows
        if known is not None and (known.shape[1] != rows.shape[1] or known.dtype != rows.dtype):
            raise InvalidRequest(
                f"hidden_states: {rows.shape[1]} elements of {rows.dtype} per row, earlier rows had {known.shape[1]} "
                f"of {known.dtype}",
                param="hidden_states",
            )
        if known is None or not self.first <= position <= self.end:
            self.first, self._rows = position, rows
        else:
            self._rows = torch.cat((known[: position - self.first], rows))

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Returns rows [end - start, layers * width]; the range must be present."""
        if self._rows is None or not self.first <= start <= end <= self.end:
            raise IndexError(f"hidden rows [{start}, {end}) of [{self.first}, {self.end})")
        return self._rows[start - self.first : end - self.first]

    def forget_before(self, position: int) -> None:
        """Drops rows that are no longer needed."""
        if self._rows is not None and position > self.first:
            kept = self._rows[position - self.first :]
            self.first = max(position, self.end) if len(kept) == 0 else position
            # A few dropped rows keep their memory until rows are added: a copy for each draft takes longer.
            is_small = len(self._rows) - len(kept) <= _MOST_DROPPED
            self._rows = None if len(kept) == 0 else kept if is_small else kept.clone()

    def cut_back(self, position: int) -> None:
        """Drops rows from `position` on: their tokens have been withdrawn."""
        if self._rows is not None and position < self.end:
            self._rows = self._rows[: max(0, position - self.first)]
