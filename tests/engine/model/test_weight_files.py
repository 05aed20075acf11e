"""Weights in pytorch_model*.bin: the tensors that torch and transformers read, and nothing that a pickle could run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from outrider.engine.errors import ModelRefused
from outrider.engine.model.load import load_model
from outrider.engine.model.weight_files import stored_tensors
from tests.older_checkpoints import write_bin_shards, write_opt

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(3, dtype=torch.bfloat16)}


class Runs:
    """What a pickle of it runs when it is loaded freely."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_opts_weights_are_those_that_transformers_reads(tmp_path: Path, prefix: str) -> None:
    folder = write_opt(tmp_path / "opt", prefix)
    ours = load_model(str(folder), row_invariant=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (ours.architecture, ours.dtype, ours.eos_token_ids) == ("OPTForCausalLM", torch.float32, (2,))
    expected = dict(theirs.named_parameters())
    found = dict(ours.model.named_parameters())
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), name


def test_shards_are_mapped_and_not_read(tmp_path: Path) -> None:
    write_bin_shards(tmp_path, WEIGHTS)
    found = stored_tensors(tmp_path)
    assert {name: (tensor.shape, tensor.stored_type) for name, tensor in found.items()} == {
        "a.weight": ((2, 3), "F32"),
        "b.weight": ((3,), "BF16"),
    }
    for name, tensor in found.items():
        assert torch.equal(tensor.read(), WEIGHTS[name])
        assert tensor.file.name in Path("/proc/self/maps").read_text()


def test_files_of_before_the_archive_format(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    found = stored_tensors(tmp_path)
    assert all(torch.equal(tensor.read(), WEIGHTS[name]) for name, tensor in found.items())


def test_parameters_views_and_shared_storage_are_plain(tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    content = {"own": torch.nn.Parameter(weight), "same": weight, "transposed": weight.T, "row": weight[1]}
    torch.save(content, tmp_path / "pytorch_model.bin")
    found = {name: tensor.read() for name, tensor in stored_tensors(tmp_path).items()}
    assert all(torch.equal(found[name], content[name]) for name in content)
    assert not any(tensor.requires_grad for tensor in found.values())
    assert all(tensor.is_contiguous() for tensor in found.values())


def test_safetensors_go_before_pickles(tmp_path: Path) -> None:
    folder = write_opt(tmp_path / "opt")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(folder)
    assert {tensor.file.name for tensor in stored_tensors(folder).values()} == {"model.safetensors"}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    ("protocol", "message"),
    [(2, "is more than plain tensors: it names posix.system, which is not run"), (4, "cannot be read: .*Unsupported")],
)
@pytest.mark.parametrize("is_archive", [True, False])
def test_a_pickle_that_runs_something_is_refused_and_does_not_run(
    tmp_path: Path, protocol: int, message: str, is_archive: bool
) -> None:
    mark = tmp_path / "it ran"
    content = {**WEIGHTS, "c.weight": Runs(f"touch '{mark}'")}
    file = tmp_path / "pytorch_model.bin"
    options: dict[str, Any] = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": is_archive}
    torch.save(content, file, **options)
    torch.load(file, weights_only=False)  # it would
    assert mark.exists()
    mark.unlink()
    with pytest.raises(ModelRefused, match=message):
        stored_tensors(tmp_path)
    assert not mark.exists()


def test_a_model_whose_pickle_runs_something_is_refused(tmp_path: Path) -> None:
    folder = write_opt(tmp_path / "opt")
    mark = tmp_path / "it ran"
    (folder / "pytorch_model-00002-of-00002.bin").write_bytes(pickle.dumps(Runs(f"touch '{mark}'"), 2))
    with pytest.raises(ModelRefused, match=r"pytorch_model-00002-of-00002\.bin"):
        load_model(str(folder))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state_dict": WEIGHTS}, "'state_dict' is a dict"),
        ({**WEIGHTS, "epoch": 3}, "'epoch' is a int"),
        ([torch.ones(2)], "it holds a list, not tensors by name"),
        ({3: torch.ones(2)}, "a tensor is called 3"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "'a' is a tensor of torch.complex64"),
        ({"a": torch.eye(2).to_sparse()}, "'a' is a tensor of torch.float32, torch.sparse_coo"),
        ({"a": torch.ones(2, device="meta")}, "'a' is a tensor of torch.float32, torch.strided, on meta"),
        ({"a": torch.ones(1).expand(2**20, 2**20)}, "'a' repeats its numbers"),
        ({"a": torch.nn.Linear(2, 2)}, r"it names torch\.nn\.modules\.linear\.Linear, which is not run"),
    ],
)
def test_what_is_no_plain_tensor_is_refused_by_name(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match=message):
        stored_tensors(tmp_path)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1", b"PK\x03\x04", b"\x80\x02}"])
def test_damaged_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelRefused, match=r"pytorch_model\.bin cannot be read: .*download it again"):
        stored_tensors(tmp_path)


def test_an_aborted_download_is_refused(tmp_path: Path) -> None:
    write_bin_shards(tmp_path, WEIGHTS)
    file = tmp_path / "pytorch_model-00002-of-00002.bin"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelRefused, match=r"pytorch_model-00002-of-00002\.bin cannot be read"):
        stored_tensors(tmp_path)
    file.unlink()
    with pytest.raises(ModelRefused, match=r"names pytorch_model-00002-of-00002\.bin, which is not there"):
        stored_tensors(tmp_path)
