"""The target's hidden states on their way from the verifier's commits to one drafter.

Rows have absolute output indices. So a drafter that joins late, or was restarted, gets the rows that it lacks with the
next commits.
"""

from __future__ import annotations

from outrider.shared.messages import DraftMethodInfo, HiddenStates, HiddenStatesRequest


class HiddenFlow:
    """The hidden states received for one lease. Row i belongs to output token i (negative: prompt) and exists once
    token i + 1 is committed.
    """

    def __init__(self, method: DraftMethodInfo, prompt_len: int) -> None:
        self._layers = method.hidden_layers
        self._takes_history = method.takes_hidden_history
        # Output index of the next row to request.
        self._next = -prompt_len
        self._pieces: list[HiddenStates] = []

    def request(self, committed_len: int) -> HiddenStatesRequest | None:
        """Returns the rows that a step at `committed_len` should request; None for a method without hidden states."""
        if not self._layers:
            return None
        first_index = self._next if self._takes_history else max(self._next, committed_len - 1)
        return HiddenStatesRequest(self._layers, first_index)

    def take(self, hidden: HiddenStates | None) -> None:
        """Takes the rows of a commit. They may begin later than requested: evicted rows are gone."""
        if hidden is not None and hidden.layers == self._layers:
            self._pieces.append(hidden)
            self._next = max(self._next, hidden.end)

    def has_all(self, committed_len: int) -> bool:
        """Returns whether every row that exists at `committed_len` has been received."""
        return not self._layers or self._next >= committed_len - 1

    def hand_over(self) -> tuple[HiddenStates, ...]:
        """Returns the rows received since the last call."""
        pieces, self._pieces = tuple(self._pieces), []
        return pieces

    def rewind(self, first_index: int | None) -> None:
        """Requests rows from `first_index` on again; None: the drafter has all."""
        if first_index is not None:
            self._next = min(self._next, first_index)
