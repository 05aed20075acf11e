"""A GGUF file from its name to tokens: with drafts, without, and as transformers decodes the model it was made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from outrider import LLM, SamplingParams
from outrider.client.doctor.checkpoints import check_checkpoints
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.local_models import with_folders
from outrider.shared.errors import ConfigError
from tests.engine.model.gguf.gguf_writer import VOCABULARY, write_gguf
from tests.engine.model.gguf.requantise import requantised
from tests.engine.tiny_models import SERVED, save_tiny_model

_PROMPTS = [[5, 9, 5, 9, 5, 9, 5], list(range(20, 60))]
_NUM_TOKENS = 24
_LLAMA_CPP = Path(__file__).parents[1] / "engine" / "model" / "gguf" / "llama_cpp"
_HYBRIDS = ("falcon_h1", "granite_hybrid", "lfm2_moe", "nemotron_h_moe", "qwen3_5", "qwen3_next")


@pytest.fixture
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, arguments = SERVED["llama"]
    widths = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}  # whole blocks
    return save_tiny_model(config, {**arguments, **widths, "vocab_size": len(VOCABULARY)}, tmp_path / "original")


def greedy(file: Path, **options: object) -> list[tuple[int, ...]]:
    return tokens(file, SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True), **options)


def tokens(file: Path, params: SamplingParams, **options: object) -> list[tuple[int, ...]]:
    with LLM(model=str(file), num_threads=1, **options) as llm:  # type: ignore[arg-type]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in _PROMPTS], params)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_the_tokens_are_transformers_with_and_without_drafts(tmp_path: Path, original: Path) -> None:
    file = write_gguf(original, tmp_path / "model.gguf", "llama")
    plain = greedy(file)
    assert greedy(file, speculative_config={"method": "ngram", "num_speculative_tokens": 3}) == plain
    as_draft = {"method": "draft_model", "model": str(file), "num_speculative_tokens": 3}
    assert greedy(file, speculative_config=as_draft) == plain
    model = transformers.AutoModelForCausalLM.from_pretrained(original)
    options = {"max_new_tokens": _NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    expected = [tuple(model.generate(torch.tensor([prompt]), **options)[0].tolist()) for prompt in _PROMPTS]
    assert [(*prompt, *tokens) for prompt, tokens in zip(_PROMPTS, plain, strict=True)] == expected


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_packed_weights_give_the_same_tokens_with_and_without_drafts(tmp_path: Path, original: Path, kind: str) -> None:
    file = write_gguf(original, tmp_path / "model.gguf", "llama", kind)
    laws = {"greedy": SamplingParams(temperature=0), "drawn": SamplingParams(temperature=0.9, seed=7)}
    drafts: dict[str, dict[str, object] | None] = {
        "off": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 3},
        "draft_model": {"method": "draft_model", "model": str(file), "num_speculative_tokens": 3},
    }
    found = {
        (law, name): tokens(file, replace(params, max_tokens=_NUM_TOKENS, ignore_eos=True), speculative_config=config)
        for law, params in laws.items()
        for name, config in drafts.items()
    }
    for law in laws:
        assert found[law, "ngram"] == found[law, "draft_model"] == found[law, "off"]
    assert found["drawn", "off"] != found["greedy", "off"]


@pytest.mark.parametrize(
    "name", ["granite_moe_shared", *(pytest.param(name, marks=pytest.mark.storm) for name in _HYBRIDS)]
)
def test_files_of_llama_cpp_give_the_same_tokens_with_and_without_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Quantised: experts joined one after another; layers with recurrent states."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = requantised(_LLAMA_CPP / f"{name}.gguf", tmp_path / f"{name}.gguf", "Q8_0")
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=_NUM_TOKENS, ignore_eos=True)
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    assert tokens(file, params, speculative_config=drafts) == tokens(file, params)


def test_a_stack_is_given_folders_for_files(tmp_path: Path, original: Path) -> None:
    file = write_gguf(original, tmp_path / "model.gguf", "llama")
    progress: list[str] = []
    settings = with_folders(StackSettings(str(file), str(original)), progress.append)
    assert (settings.draft_model, progress) == (str(original), [f"reading {file}"])
    assert Path(settings.model).name == "model"
    assert (Path(settings.model) / "tokenizer.json").is_file()
    assert {check.level for check in check_checkpoints(settings.model, [])} == {"ok"}  # as `outrider up` does next
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="cannot be read as GGUF"):
        with_folders(StackSettings(str(file), ""), progress.append)
