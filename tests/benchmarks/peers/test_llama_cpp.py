"""What the benchmark says where there is no llama-server, or one that does not run; llama.cpp itself is not needed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import serving
from benchmarks.peers.llama_cpp import LlamaCppPeer
from benchmarks.peers.server_process import PeerError
from outrider.shared.errors import ConfigError

DRAFT = str(Path(__file__).parents[3] / "models" / "demo-draft")


def test_without_a_llama_server_its_row_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "console", Console(width=200))  # so wide that no cell is broken
    row = {"system": "transformers", "variant": "plain", "num_streams": 1, "tokens_per_s": 31.6}
    serving._show([row | {"outputs_equal_to_plain": "4/4", "outputs_equal_to_outrider": "3/4"}])
    assert "not measured: no --llama-server" in capsys.readouterr().out


def test_a_llama_server_that_ends_is_reported_with_what_it_said() -> None:
    binary = Path(shutil.which("ls") or "/bin/ls")  # it refuses the options
    with (
        pytest.raises(PeerError, match=r"did not start; its log ends with: .*--model"),
        LlamaCppPeer(binary, DRAFT, DRAFT),
    ):
        pass


def test_a_llama_server_that_cannot_be_run_is_a_wrong_setting(tmp_path: Path) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text("no program")
    with pytest.raises(ConfigError, match=r"--llama-server .*Permission denied"), LlamaCppPeer(binary, DRAFT, DRAFT):
        pass
