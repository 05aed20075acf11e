"""The target's hidden states on their way from the verifier's commits to one drafter.

Counts rows by absolute output index, so that a drafter that joins late, or has lost what it had, is given the missing
ones with the next commits, and nobody else notices.
"""

from __future__ import annotations

from shared.messages import DraftMethodInfo, HiddenStates, HiddenStatesRequest


class HiddenFlow:
    """Of one lease. Row i belongs to output token i and exists once token i + 1 is committed."""

    def __init__(self, method: DraftMethodInfo, prompt_len: int) -> None:
        self._layers = method.hidden_layers
        self._takes_history = method.takes_hidden_history
        # Output index of the next row that the drafter does not have.
        self._next = -prompt_len
        self._pieces: list[HiddenStates] = []

    def request(self, committed_len: int) -> HiddenStatesRequest | None:
        """What a step at `committed_len` should bring; None for a method that takes no hidden states."""
        if not self._layers:
            return None
        first_index = self._next if self._takes_history else max(self._next, committed_len - 1)
        return HiddenStatesRequest(self._layers, first_index)

    def take(self, hidden: HiddenStates | None) -> None:
        """Rows that came with a commit. They may begin late: what a cached prefix has lost nobody can send."""
        if hidden is not None and hidden.layers == self._layers:
            self._pieces.append(hidden)
            self._next = max(self._next, hidden.end)

    def has_all(self, committed_len: int) -> bool:
        """Whether every row that exists at `committed_len` has come."""
        return not self._layers or self._next >= committed_len - 1

    def hand_over(self) -> tuple[HiddenStates, ...]:
        """The rows that have come since the last call."""
        pieces, self._pieces = tuple(self._pieces), []
        return pieces

    def rewind(self, first_index: int | None) -> None:
        """The drafter says that it lacks rows from `first_index` on."""
        if first_index is not None:
            self._next = min(self._next, first_index)
