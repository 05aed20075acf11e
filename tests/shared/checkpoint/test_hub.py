"""Names of models: folders, files and ids of the Hub, against the real client and a small server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.shared.checkpoint.hub import (
    HubName,
    files_to_read,
    hub_id,
    local_checkpoint,
    parse_hub_name,
    with_revision,
)
from outrider.shared.errors import ConfigError
from tests.hub_server import COMMIT, Hub, running_hub

SAFETENSORS = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "chat_template.jinja": b"{{ messages }}",
    "model-00001-of-00002.safetensors": b"a" * 100,
    "model-00002-of-00002.safetensors": b"b" * 100,
    "model.safetensors.index.json": b"{}",
    "pytorch_model.bin": b"c" * 100,
    "consolidated.safetensors": b"d" * 100,
    "original/params.json": b"{}",
    "README.md": b"# A model",
}
# As OPT lies on the Hub: no tokenizer.json, no safetensors.
OPT = {
    **dict.fromkeys(("config.json", "vocab.json", "tokenizer_config.json", "special_tokens_map.json"), b"{}"),
    **dict.fromkeys(("merges.txt", "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"), b"x"),
    "pytorch_model.bin.index.json": b"{}",
    "flax_model.msgpack": b"x",
    "tf_model.h5": b"x",
}
GGUF = {
    **dict.fromkeys(("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf", "mmproj-tiny-Q8_0.gguf"), b"GGUF"),
    **{f"tiny-BF16-0000{part}-of-00002.gguf": b"GGUF" for part in (1, 2)},
}
DATA = {"data/train.jsonl": b'{"prompt": "Hello"}\n'}
REPOS = {
    "datasets/org/chats": DATA,
    "org/tiny": SAFETENSORS,
    "facebook/opt": OPT,
    "org/tiny-GGUF": GGUF,
    "org/gated": SAFETENSORS,
}
SCRIPT = """
import sys
from outrider.shared.checkpoint.hub import local_checkpoint, local_data_file
from outrider.shared.errors import ConfigError
try:
    if sys.argv[2] == "data":
        print(local_data_file(sys.argv[1], "--prompts"))
    else:
        print(local_checkpoint(sys.argv[1], "--model", weights=sys.argv[2] == "weights"))
except ConfigError as error:
    print(f"refused: {error.message}")
"""


@dataclass
class Machine:
    """A process of its own per name: the client reads its variables when it is imported."""

    home: Path
    url: str

    def resolve(self, name: str, *, weights: bool = True, **env: str) -> str:
        return self._run(name, "weights" if weights else "", **env)

    def resolve_data(self, name: str, **env: str) -> str:
        return self._run(name, "data", **env)

    def _run(self, name: str, what: str, **env: str) -> str:
        command = [sys.executable, "-c", SCRIPT, name, what]
        env = {**os.environ, "HF_HOME": str(self.home), "HF_ENDPOINT": self.url, "HF_TOKEN": "", **env}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.strip()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub(Hub(REPOS, gated=frozenset({"org/gated"}))) as running:
        yield running


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    return Machine(tmp_path / "home", hub.url)


def test_what_is_read_is_downloaded_once_and_found_without_the_hub(hub: Hub, machine: Machine) -> None:
    folder = Path(machine.resolve("org/tiny"))
    unread = {"pytorch_model.bin", "consolidated.safetensors", "original/params.json", "README.md"}
    assert {path.name for path in folder.iterdir()} == set(SAFETENSORS) - unread
    assert all((folder / name).read_bytes() == SAFETENSORS[name] for name in set(SAFETENSORS) - unread)
    assert folder == machine.home / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    hub.requests.clear()
    assert machine.resolve("org/tiny@main") == str(folder)
    assert not [request for request in hub.requests if "/resolve/" in request]
    assert machine.resolve("org/tiny", HF_HUB_OFFLINE="1") == str(folder)
    assert machine.resolve("org/tiny", HF_ENDPOINT="http://127.0.0.1:9") == str(folder)


def test_a_gateway_gets_no_weights(machine: Machine) -> None:
    folder = Path(machine.resolve("org/tiny", weights=False))
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json", "chat_template.jinja"}


def test_one_gguf_file(machine: Machine) -> None:
    path = Path(machine.resolve("org/tiny-GGUF:Q4_K_M"))
    assert path.name == "tiny-Q4_K_M.gguf"
    assert [other.name for other in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("name", "env", "words"),
    [
        ("org/nothing", {}, "there is no folder org/nothing here, and no such repository at"),
        ("org/gated", {}, "accept its terms at"),
        ("org/tiny@v9", {}, "has no revision v9"),
        ("org/tiny", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set while the cache does not hold it"),
        ("org/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached"),
        ("org/tiny-GGUF", {}, "name one of its files: org/tiny-GGUF:"),
        ("org/tiny-GGUF:Q2_K", {}, "no GGUF file fits 'Q2_K'; it has"),
    ],
)
def test_what_cannot_be_had_is_said_with_the_fix(machine: Machine, name: str, env: dict[str, str], words: str) -> None:
    said = machine.resolve(name, **env)
    assert said.startswith("refused: --model: ")
    assert words in said
    assert "\n" not in said


def test_a_token_opens_a_gated_model(machine: Machine) -> None:
    assert Path(machine.resolve("org/gated", HF_TOKEN="hf_x")).is_dir()


def test_a_folder_or_file_here_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert local_checkpoint("org/tiny", "--model") == "org/tiny"
    assert local_checkpoint("a.gguf", "--model") == "a.gguf"
    assert local_checkpoint("", "--draft-model") == ""
    with pytest.raises(ConfigError, match=r"--draft-model: \./nothing/here does not exist"):
        local_checkpoint("./nothing/here", "--draft-model")


def test_what_a_model_is_called_in_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "llama").mkdir()
    assert hub_id("~/llama") == hub_id(str(tmp_path / "llama")) == ""
    assert hub_id("org/tiny@v1") == "org/tiny@v1"


def test_names() -> None:
    assert parse_hub_name("org/na.me-7B") == HubName("org/na.me-7B", None, "")
    assert parse_hub_name("org/name@refs/pr/3") == HubName("org/name", "refs/pr/3", "")
    assert parse_hub_name("org/name@v1:Q4_K_M") == HubName("org/name", "v1", "Q4_K_M")
    assert [parse_hub_name(name) for name in ("name", "/a/b", "./a/b", "../a", "~/b", "a/b/c", "")] == [None] * 7


@pytest.mark.parametrize(
    ("name", "revision", "named"),
    [
        ("org/tiny", "", "org/tiny"),
        ("org/tiny", "v1.0", "org/tiny@v1.0"),
        ("org/tiny@v1.0", "v1.0", "org/tiny@v1.0"),
        ("org/tiny:Q4_K_M", "refs/pr/3", "org/tiny@refs/pr/3:Q4_K_M"),
    ],
)
def test_a_revision_becomes_part_of_the_name(name: str, revision: str, named: str) -> None:
    assert with_revision(name, revision, "--revision") == named


@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        (".", "main", "--revision: . is no id of the Hugging Face Hub, and files here have no revisions"),
        ("a/b/c", "main", "--revision: a/b/c is no id"),
        ("org/tiny@v1", "v2", "--revision: v2 is given, and org/tiny@v1 names v1; give one of them"),
        ("org/tiny", "v 2", "--revision: 'v 2' is no branch, tag or commit"),
    ],
)
def test_what_has_no_revision(name: str, revision: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_revision(name, revision, "--revision")
    assert words in refused.value.message


def test_files_as_they_lie_on_the_hub() -> None:
    def of(file: str = "") -> HubName:
        return HubName("org/name", None, file)

    assert set(files_to_read(of(), OPT)) == set(OPT) - {"flax_model.msgpack", "tf_model.h5"}
    parts = ["tiny-BF16-00001-of-00002.gguf", "tiny-BF16-00002-of-00002.gguf"]
    assert files_to_read(of("BF16"), GGUF) == files_to_read(of("bf16"), GGUF) == parts
    assert files_to_read(of("tiny-Q8_0.gguf"), GGUF) == files_to_read(of("Q8_0"), GGUF) == ["tiny-Q8_0.gguf"]
    with pytest.raises(ConfigError, match=r"neither safetensors nor pytorch_model\.bin"):
        files_to_read(of(), {"config.json", "model.onnx"})


def test_a_disk_that_is_too_small_is_said_before_the_download(hub: Hub, machine: Machine) -> None:
    too_much = b"x" * 10

    class Large(bytes):
        def __len__(self) -> int:
            return 10**15

    hub.repos = {"org/huge": {"config.json": b"{}", "model.safetensors": Large(too_much)}}
    said = machine.resolve("org/huge")
    assert "the download takes 1000000.0 GB" in said
    assert "set HF_HOME" in said


def test_a_file_of_a_data_set(hub: Hub, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "home", hub.url)
    path = machine.resolve_data("org/chats:data/train.jsonl")
    assert Path(path).read_bytes() == DATA["data/train.jsonl"]
    assert machine.resolve_data("org/chats:data/train.jsonl", HF_HUB_OFFLINE="1") == path
    here = tmp_path / "here.jsonl"
    here.write_bytes(b"")
    assert machine.resolve_data(str(here)) == str(here)
    said = machine.resolve_data("org/chats:none.jsonl")
    assert said == "refused: --prompts: the data set org/chats has no file none.jsonl"
    for name in ("org/chats", str(tmp_path / "none.jsonl")):
        assert f"--prompts: {name} does not exist, and is no file of a data set" in machine.resolve_data(name)
