"""The file of API keys that simulated gateways share, and the replacement of a key as docs/operations.md has it: both
keys are in the file until every gateway has read it and clients send the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from outrider.shared.api_keys import key_line
from outrider.shared.errors import Unauthenticated
from tests.simulation.links import Network
from tests.simulation.services import GatewayNode

# Of all keys in the file.
OWNER = "client"
# seconds; between two looks at the gateways, and from the clients' change to the old key's removal: a request is under
# way for 3 at most
_LOOK_S, _OLD_KEY_S = 0.5, 5.0


class KeyFile:
    """current: the key that clients send. is_changing: it is being replaced."""

    def __init__(self, path: Path, net: Network) -> None:
        self.path = path
        self.current = "or-0"
        self._net = net
        self._num = 0
        self.is_changing = False
        self._write(self.current)

    def _write(self, *keys: str) -> None:
        self.path.write_text("\n".join(key_line(OWNER, key) for key in keys))

    def replace(self, gateways: Callable[[], Sequence[GatewayNode | None]]) -> None:
        """Begins to replace the key, unless it is being replaced. gateways: those there are; None: one is down."""
        if self.is_changing:
            return
        self.is_changing = True
        self._num += 1
        new = f"or-{self._num}"
        self._write(self.current, new)
        self._net.trace.add("! two API keys")
        _tell(gateways())
        self._later(_LOOK_S, lambda: self._look(new, gateways))

    def _look(self, new: str, gateways: Callable[[], Sequence[GatewayNode | None]]) -> None:
        if not all(node is not None and _takes(node, new) for node in gateways()):
            self._later(_LOOK_S, lambda: self._look(new, gateways))
            return
        self.current = new
        self._net.trace.add("! clients send the new API key")
        self._later(_OLD_KEY_S, lambda: self._end(new, gateways))

    def _end(self, new: str, gateways: Callable[[], Sequence[GatewayNode | None]]) -> None:
        self._write(new)
        self._net.trace.add("! the old API key is gone")
        _tell(gateways())
        self.is_changing = False

    def _later(self, seconds: float, callback: Callable[[], None]) -> None:
        self._net.later(self._net.loop.time() + seconds, callback)


def _tell(gateways: Sequence[GatewayNode | None]) -> None:
    """SIGHUP. A paused process gets it when it goes on; one that starts reads the file anyway."""
    for node in gateways:
        if node is not None:
            node.net.loop.call_soon(node.reload_keys, context=node.process.main.context)


def _takes(node: GatewayNode, key: str) -> bool:
    with suppress(Unauthenticated):
        return node.admission is not None and node.admission.identify(f"Bearer {key}") is not None
    return False
