"""`--prediction FILE` of `complete` and `chat`: it travels as text; what is no text is refused before anything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_gateway import Gateway, Log, serving
from typer.testing import CliRunner

from outrider.client.cli.app import app

TEXT = "def area(shape):\n    return shape.width\n\u00e9\n"


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_the_file_travels_with_the_request(command: str, tmp_path: Path) -> None:
    file = tmp_path / "shapes.py"
    file.write_text(TEXT, encoding="utf-8")
    gateway = Gateway(Log())
    with serving(gateway) as address:
        for options in (["--prediction", str(file)], []):
            done = CliRunner().invoke(app, [command, "Rename it.", "--address", address, "--json", *options])
            assert done.exit_code == 0, done.output
    assert gateway.predictions == [TEXT, ""]


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_what_is_no_text_is_refused(command: str, tmp_path: Path) -> None:
    binary = tmp_path / "shapes.pyc"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, said in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory"),
        (binary, "is not UTF-8 text"),
    ):
        done = CliRunner().invoke(app, [command, "Rename it.", "--address", "127.0.0.1:1", "--prediction", str(path)])
        assert done.exit_code == 2
        assert f"--prediction: {path}" in done.stderr
        assert said in done.stderr
