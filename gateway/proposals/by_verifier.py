"""Values that the gateway learns per verifier: one per address, dropped when the verifier leaves the fleet."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class ByVerifier(Generic[ValueT]):
    """A value per verifier. make: its initial value. addresses: the verifiers in the fleet now."""

    def __init__(self, make: Callable[[], ValueT], addresses: Callable[[], Collection[str]]) -> None:
        self._make = make
        self._addresses = addresses
        self._values: dict[str, ValueT] = {}

    def of(self, address: str) -> ValueT:
        if address not in self._values:
            present = {address, *self._addresses()}
            self._values = {known: value for known, value in self._values.items() if known in present}
            self._values[address] = self._make()
        return self._values[address]
