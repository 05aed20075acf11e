"""Tokenizers in their older forms: the ids are those of transformers' own tokenizer for the same files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from outrider.engine.errors import ModelRefused
from outrider.engine.model.local_model import local_model
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.checkpoint.file_names import older_tokenizer
from outrider.shared.errors import ConfigError
from tests.older_checkpoints import TEXTS, write_llama2, write_opt


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "outrider" / "tokenizers"


@pytest.fixture
def opt(tmp_path: Path, cache: Path) -> Path:
    return write_opt(tmp_path / "opt")


def require_the_ids_of_transformers(folder: Path, made: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.is_fast
    ours = Tokenizer.load(made)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.backend_tokenizer.decode(
            ids, skip_special_tokens=False
        )
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.special_ids == set(theirs.all_special_ids)
    assert ours.vocab_size == len(theirs)


def test_no_model_is_not_the_current_folder(opt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter without heads has no target."""
    monkeypatch.chdir(opt)
    assert local_model("", "--target-model") == ""


def test_opts_vocabulary_and_merges(opt: Path) -> None:
    made = Path(local_model(str(opt), "--model"))
    assert older_tokenizer(opt) == ("vocab.json", "merges.txt")
    assert older_tokenizer(made) == ()
    require_the_ids_of_transformers(opt, made)
    assert Tokenizer.load(made).encode("a")[0] == 2  # OPT's prompts begin with </s>


def test_llama_2s_sentencepiece_model(tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("sentencepiece")
    folder = write_llama2(tmp_path / "llama-2")
    made = Path(local_model(str(folder), "--model"))
    require_the_ids_of_transformers(folder, made)
    assert Tokenizer.load(made).encode("a")[0] == 1
    assert Tokenizer.load(made).has_token_bytes


def test_without_sentencepiece_the_package_is_named(tmp_path: Path, cache: Path, opt: Path) -> None:
    (opt / "vocab.json").rename(opt / "tokenizer.model")
    code = (
        "import sys, importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'sentencepiece' else find(name, *rest)\n"
        f"sys.argv = ['', {str(opt)!r}]\n"
        "from outrider.engine.model.__main__ import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().endswith("its tokenizer.model needs sentencepiece Fix: pip install sentencepiece")


def test_the_folder_has_the_other_files_and_the_name(opt: Path, cache: Path) -> None:
    (opt / "chat_template.jinja").write_text("{{ messages[0].content }}")
    made = Path(local_model(str(opt), "--model"))
    assert (made.name, made.parent.parent) == ("opt", cache)
    names = {file.name for file in opt.iterdir()}
    assert {file.name for file in made.iterdir()} == names | {"tokenizer.json"}
    own = {file.name for file in made.iterdir() if not file.is_symlink()}
    assert own == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert Tokenizer.load(made).chat_template_source == "{{ messages[0].content }}"
    assert {file.name for file in opt.iterdir()} == names  # nothing is written there


def test_it_is_made_once_and_anew_for_other_files(opt: Path, cache: Path) -> None:
    made = local_model(str(opt), "--model")
    (Path(made) / "mark").touch()
    assert local_model(str(opt), "--model") == made
    assert (Path(made) / "mark").exists()
    os.utime(opt / "merges.txt", (1, 1))
    assert local_model(str(opt), "--model") != made
    assert local_model(made, "--model") == made


def test_nothing_is_left_of_one_that_fails(opt: Path, cache: Path) -> None:
    (opt / "vocab.json").write_text("{")
    with pytest.raises(ModelRefused, match=r"its tokenizer \(vocab.json and merges.txt\) cannot be converted"):
        local_model(str(opt), "--model")
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_tokenizer_json_is_taken_as_it_is(opt: Path, cache: Path) -> None:
    made = Path(local_model(str(opt), "--model"))
    (opt / "tokenizer.json").write_bytes((made / "tokenizer.json").read_bytes())
    assert local_model(str(opt), "--model") == str(opt)


def test_the_gateway_says_which_command_converts_it(opt: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        Tokenizer.load(opt)
    _, command, _ = refusal.value.message.split("`")
    assert "its vocab.json and merges.txt must be converted" in refusal.value.message
    program, *arguments = command.split()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert (program, done.returncode) == ("python", 0)
    made = done.stdout.strip().splitlines()[-1]
    assert made == local_model(str(opt), "--model")
    assert json.loads((Path(made) / "tokenizer.json").read_text())["model"]["type"] == "BPE"
