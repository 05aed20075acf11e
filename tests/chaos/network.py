"""A small network of Linux namespaces: every member its own stack and address, one bridge between them.

Links can be cut (`ip link set down`), delayed and made lossy: by `tc netem` where the kernel has it, else by a wire in
user space (wire.py). Needs root and iproute2. Not here: what runs in the namespaces (netns_fleet.py).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SUBNET = "10.213.7"
_CLONE_NEWNET = 0x40000000


class NetworkUnavailable(Exception):
    """This machine, or this user, cannot make namespaces. The message says what is missing."""


@dataclass
class Member:
    """port: its end of the link at the bridge. wire: the process that stands in the link, if one does."""

    name: str
    namespace: str
    address: str
    port: str
    number: int
    wire: subprocess.Popen[bytes] | None = None


class Network:
    """`with` makes the bridge; at its end every namespace is gone, and with them all that was in them."""

    def __init__(self) -> None:
        self._stem = f"outrider{os.getpid()}"
        self._hub = f"{self._stem}-hub"
        self.members: dict[str, Member] = {}
        self.has_netem = False

    def __enter__(self) -> Network:
        _check_machine()
        _run("ip", "netns", "add", self._hub)
        try:
            self._in_hub("link", "add", "bridge", "type", "bridge")
            self._in_hub("link", "set", "bridge", "up")
            self.has_netem = self._try_netem()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members.values():
            self._remove_wire(member)
            _run("ip", "netns", "delete", member.namespace)
        _run("ip", "netns", "delete", self._hub)

    def attach(self, name: str) -> Member:
        """A namespace of that name, on the bridge."""
        number = len(self.members) + 1
        member = Member(name, f"{self._stem}-{name}", f"{_SUBNET}.{number}", f"port{number}", number)
        _run("ip", "netns", "add", member.namespace)
        self.members[name] = member
        link = ("link", "add", member.port, "type", "veth", "peer", "name", "eth0", "netns", member.namespace)
        self._in_hub(*link)
        self._in_hub("link", "set", member.port, "master", "bridge", "up")
        for command in (
            ("addr", "add", f"{member.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _run("ip", "-n", member.namespace, *command)
        return member

    def enter(self, member: Member) -> None:
        """This thread, and the processes that it starts, live there from now on. Raises OSError."""
        with Path(f"/run/netns/{member.namespace}").open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {member.namespace}")

    def prefix(self, member: Member) -> Sequence[str]:
        """Before a command: it runs there."""
        return ("ip", "netns", "exec", member.namespace)

    def cut(self, member: Member) -> None:
        """Nothing goes in or out; nobody is told."""
        self._in_hub("link", "set", member.port, "down")

    def join(self, member: Member) -> None:
        self._in_hub("link", "set", member.port, "up")

    def impair(self, member: Member, *, delay_ms: float = 0.0, loss_percent: float = 0.0) -> None:
        """Both ways: the delay is that of one way."""
        if self.has_netem:
            netem = ("netem", "delay", f"{delay_ms}ms", "loss", f"{loss_percent}%")
            _run("tc", "-n", self._hub, "qdisc", "replace", "dev", member.port, "root", *netem)
            _run("tc", "-n", member.namespace, "qdisc", "replace", "dev", "eth0", "root", *netem)
        else:
            self._lay_wire(member, delay_ms, loss_percent)

    def restore(self, member: Member) -> None:
        if self.has_netem:
            _run("tc", "-n", self._hub, "qdisc", "delete", "dev", member.port, "root")
            _run("tc", "-n", member.namespace, "qdisc", "delete", "dev", "eth0", "root")
        else:
            self._remove_wire(member)

    def _lay_wire(self, member: Member, delay_ms: float, loss_percent: float) -> None:
        """port - wire process - near = far - bridge, where there was port - bridge."""
        near, far = f"near{member.number}", f"far{member.number}"
        self._in_hub("link", "add", near, "type", "veth", "peer", "name", far)
        self._in_hub("link", "set", near, "up")
        member.wire = subprocess.Popen(
            [
                *("ip", "netns", "exec", self._hub, sys.executable, "-m", "tests.chaos.wire", member.port, near),
                *("--delay-ms", str(delay_ms), "--loss-percent", str(loss_percent)),
            ],
            stdin=subprocess.DEVNULL,
        )
        self._in_hub("link", "set", far, "master", "bridge", "up")
        self._in_hub("link", "set", member.port, "nomaster")

    def _remove_wire(self, member: Member) -> None:
        process, member.wire = member.wire, None
        if process is not None:
            process.kill()
            process.wait()
            self._in_hub("link", "delete", f"near{member.number}")
            self._in_hub("link", "set", member.port, "master", "bridge")

    def _try_netem(self) -> bool:
        command = ["tc", "-n", self._hub, "qdisc", "add", "dev", "bridge", "root", "netem", "delay", "1ms"]
        found = subprocess.run(command, capture_output=True, check=False).returncode == 0
        if found:
            _run("tc", "-n", self._hub, "qdisc", "delete", "dev", "bridge", "root")
        return found

    def _in_hub(self, *arguments: str) -> None:
        _run("ip", "-n", self._hub, *arguments)


def _check_machine() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        raise NetworkUnavailable(
            f"network namespaces need Linux with iproute2; missing: {', '.join(missing) or 'Linux'}"
        )
    if os.geteuid() != 0:
        raise NetworkUnavailable("network namespaces need root: run it with sudo")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetworkUnavailable(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
