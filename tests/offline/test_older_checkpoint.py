"""A checkpoint as OPT's lies on the Hub, from its name to tokens: those that transformers decodes, in float32."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from outrider import LLM, SamplingParams
from outrider.client.doctor.checkpoints import check_checkpoints
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.local_models import with_folders
from outrider.shared.errors import ConfigError
from tests.hub_server import Hub, running_hub
from tests.older_checkpoints import TEXTS, write_opt

_PROMPTS = [text for text in TEXTS if text]
_NUM_TOKENS = 16


@pytest.fixture
def opt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_opt(tmp_path / "opt", prefix="")


def greedy(folder: Path | str, **options: object) -> list[tuple[list[int], list[int], str]]:
    """Prompt ids, output ids and text, per prompt."""
    params = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    with LLM(model=str(folder), num_threads=1, **options) as llm:  # type: ignore[arg-type]
        outputs = llm.generate(_PROMPTS, params)
    return [(list(out.prompt_token_ids), list(out.outputs[0].token_ids), out.outputs[0].text) for out in outputs]


def greedy_of_transformers(folder: Path) -> list[tuple[list[int], list[int], str]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"max_new_tokens": _NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    found = []
    for text in _PROMPTS:
        inputs = tokenizer(text, return_tensors="pt")  # with a mask: without one, generate() hides a <pad> of the text
        prompt = inputs["input_ids"][0].tolist()
        ids = model.generate(**inputs, **options)[0, len(prompt) :].tolist()
        found.append((prompt, ids, tokenizer.decode(ids, skip_special_tokens=True)))
    return found


def test_the_tokens_are_transformers_with_and_without_drafts(opt: Path) -> None:
    expected = greedy_of_transformers(opt)
    assert greedy(opt) == expected
    as_draft = {"method": "draft_model", "model": str(opt), "num_speculative_tokens": 3}
    assert greedy(opt, speculative_config=as_draft) == expected


def test_a_stack_is_given_a_folder_that_it_starts_with(opt: Path) -> None:
    progress: list[str] = []
    settings = with_folders(StackSettings(str(opt), str(opt)), progress.append)
    assert progress == [f"converting vocab.json and merges.txt of {opt} to tokenizer.json"] * 2
    assert (Path(settings.model).name, settings.draft_model) == ("opt", settings.model)
    checks = list(check_checkpoints(settings.model, settings.draft_folders))
    assert {check.level for check in checks} == {"ok"}
    assert [check.found for check in check_checkpoints(str(opt), [])][1:] == [
        "vocab.json and merges.txt, converted to tokenizer.json at start"
    ]
    (opt / "merges.txt").write_text("no merges\n")
    with pytest.raises(ConfigError, match=r"--model: .*cannot be converted"):
        with_folders(StackSettings(str(opt), ""), progress.append)


def test_from_the_hub(tmp_path: Path, opt: Path) -> None:
    files = {file.name: file.read_bytes() for file in opt.iterdir()}
    with running_hub(Hub({"facebook/tiny-opt": {**files, "flax_model.msgpack": b"x", "tf_model.h5": b"x"}})) as hub:
        where = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-m", "outrider.engine.model", "facebook/tiny-opt"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **where})
    assert done.returncode == 0, done.stderr
    made = Path(done.stdout.strip().splitlines()[-1])
    assert {file.name for file in made.iterdir()} == {*files, "tokenizer.json"}
    assert greedy(made) == greedy_of_transformers(opt)
