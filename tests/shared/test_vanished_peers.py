"""A peer that has vanished is noticed: vanished_peers.py, started with the run (conftest.py), for it mostly waits."""

from __future__ import annotations

import subprocess

TIMEOUT_S = 150.0


def test_peers_that_vanish_are_noticed(vanished_peers: subprocess.Popen[str]) -> None:
    _, said = vanished_peers.communicate(timeout=TIMEOUT_S)
    assert vanished_peers.returncode == 0, said
