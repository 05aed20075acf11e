"""What a folder's JSON files say about its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.client.stack.commands import StackSettings
from outrider.client.stack.local_models import with_folders
from outrider.shared.checkpoint.quantization import read_quantization, require_readable
from outrider.shared.errors import ConfigError


def write(folder: Path, name: str, content: Any) -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder


def test_nothing_is_said_of_plain_weights(tmp_path: Path) -> None:
    assert read_quantization(tmp_path) is None
    assert require_readable(write(tmp_path, "config.json", {"quantization_config": None})) is None


@pytest.mark.parametrize(
    ("name", "content", "method"),
    [
        ("config.json", {"quantization_config": {"quant_method": "AWQ", "bits": 4}}, "awq"),
        ("config.json", {"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
        ("config.json", {"quantization_config": {"bits": 4}}, "method not named"),
        ("config.json", {"quantization_config": {"quant_method": "intel/auto-round"}}, "auto-round"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128}, "awq"),
    ],
)
def test_each_file_that_says_it_is_read(tmp_path: Path, name: str, content: Any, method: str) -> None:
    found = read_quantization(write(tmp_path, name, content))
    assert found is not None
    assert (found.method, found.file) == (method, name)


def test_autoawqs_old_names_are_todays(tmp_path: Path) -> None:
    found = read_quantization(write(tmp_path, "quant_config.json", {"w_bit": 4, "q_group_size": 64}))
    assert found is not None
    assert found.settings == {"bits": 4, "group_size": 64}


@pytest.mark.parametrize("content", ["[1]", "{", '"text"'])
def test_broken_files_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_quantization(tmp_path)


@pytest.mark.parametrize("option", ["--model", "--draft-model"])
def test_the_command_refuses_before_it_starts_anything(tmp_path: Path, option: str) -> None:
    (tmp_path / "plain").mkdir()
    plain = str(write(tmp_path / "plain", "config.json", {}))
    quantised = str(write(tmp_path, "config.json", {"quantization_config": {"quant_method": "aqlm"}}))
    model, draft = (quantised, plain) if option == "--model" else (plain, quantised)
    with pytest.raises(ConfigError, match=rf"{option}: .*quantised \(aqlm, config.json\)"):
        with_folders(StackSettings(model, draft), lambda _message: None)
