"""A model written as GGUF and loaded again is the model: weights to the bit, logits as transformers has the original's.

The logits see what the weights do not: frequencies, windows, scales, in positions beyond every window.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from batches import CachedSequence, run_step
from gguf_models import MODELS, gguf_model
from gguf_writer import VOCABULARY, write_gguf
from tokenizers import Tokenizer

from outrider.drafting.checkpoints.recognise import recognise
from outrider.engine.certificate import certify
from outrider.engine.errors import ModelRefused
from outrider.engine.model.gguf.folder import model_folder
from outrider.engine.model.load import load_model
from outrider.engine.run.runner import ModelRunner
from outrider.shared.checkpoint.quantization import read_quantization

_LENGTH = 60
# float32, two layers; tests/engine/model/test_architectures.py
_TOLERANCE = 2e-5


def written(tmp_path: Path, name: str, kind: str = "F32", **more: Any) -> tuple[Path, Path]:
    """(the checkpoint, its GGUF file)"""
    return gguf_model(tmp_path, name, kind, more)


def own_logits(runner: ModelRunner, token_ids: list[int]) -> torch.Tensor:
    return run_step(runner, [CachedSequence(token_ids, [0, 1, 2, 3]).rows(len(token_ids))])[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    folder, file = written(tmp_path, name)
    original = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    found = load_model(str(file), row_invariant=False).model.state_dict()
    for parameter, weight in original.state_dict().items():
        # A norm of Gemma's is rounded where 1 is added and taken off.
        tolerance = 1e-6 if name == "gemma3" and "norm" in parameter else 0
        torch.testing.assert_close(found[parameter], weight, atol=tolerance, rtol=0, msg=parameter)
    token_ids = torch.randint(3, len(VOCABULARY), (_LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = original(torch.tensor([token_ids]), use_cache=False).logits[0]
    loaded = load_model(str(file))
    logits = own_logits(ModelRunner(loaded, loaded.make_cache(4, 16)), token_ids)
    torch.testing.assert_close(logits, expected, atol=_TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F16", torch.float32), ("BF16", torch.bfloat16), ("Q8_0", torch.bfloat16)]
)
def test_the_dtype_is_that_of_the_matrices(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    _, file = written(tmp_path, "llama", kind)
    loaded = load_model(str(file))
    assert loaded.dtype == dtype
    assert (read_quantization(Path(loaded.path)) is not None) == (kind == "Q8_0")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_the_certificate_holds(tmp_path: Path, kind: str) -> None:
    _, file = written(tmp_path, "llama", kind)
    loaded = load_model(str(file))
    certificate = certify(loaded, ModelRunner(loaded, loaded.make_cache(2, 16)))
    assert certificate.holds, certificate.describe()


def test_the_folder_is_a_checkpoints(tmp_path: Path) -> None:
    _, file = written(tmp_path, "llama")
    folder = Path(model_folder(str(file)))
    assert model_folder(str(file)) == str(folder)
    assert recognise(folder) == "draft_model"
    assert load_model(str(folder)).eos_token_ids == (1, 2)  # </s>, and the control token that ends a turn
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode('A!"').ids == [35, 97]
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 128


@pytest.mark.parametrize("end", ["<|endoftext|>", "<turn|>"])
def test_the_end_of_a_text_ends_a_turn_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """As in Qwen's generation_config.json, and in llama.cpp: its files name the end of a turn alone."""
    monkeypatch.setattr("gguf_writer.VOCABULARY", [end, *VOCABULARY[1:]])
    _, file = written(tmp_path, "qwen2")
    config = json.loads((Path(model_folder(str(file))) / "generation_config.json").read_text())
    assert config["eos_token_id"] == [0, 1, 2]


def test_files_that_lie_in_a_checkpoints_folder_are_not_read(tmp_path: Path) -> None:
    folder, file = written(tmp_path, "llama", "Q4_0")
    file.rename(folder / "other.gguf")
    assert load_model(str(folder)).dtype == torch.float32
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"give the name of one \.gguf file"):
        load_model(str(folder))


def test_another_file_of_the_same_name_gets_another_folder(tmp_path: Path) -> None:
    folder, file = written(tmp_path, "llama")
    before = model_folder(str(file))
    write_gguf(folder, file, "llama", "Q8_0")
    assert model_folder(str(file)) != before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"llama.attention.scale": 0.3}, r"llama\.attention\.scale, which is not read"),
        ({"llama.expert_used_count": 2}, r"llama\.expert_used_count, which is not read"),
        ({"llama.expert_count": 8}, r"has no llama\.expert_used_count"),
        ({"llama.rope.dimension_count": 8}, r"llama\.rope\.dimension_count is 8"),
        ({"llama.rope.scaling.type": "longrope"}, r"rope\.scaling\.type is 'longrope'"),
    ],
)
def test_metadata_that_is_not_read_refuses_the_file(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    _, file = written(tmp_path, "llama", **more)
    with pytest.raises(ModelRefused, match=message):
        load_model(str(file))


def patched(monkeypatch: pytest.MonkeyPatch, method: str, value: Any) -> None:
    """The writer writes this instead."""
    before = getattr(gguf.GGUFWriter, method)
    monkeypatch.setattr(gguf.GGUFWriter, method, lambda writer, _given: before(writer, value))


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("add_tokenizer_pre", "viking", r"tokenizer\.ggml\.pre is 'viking'"),
        ("add_tokenizer_model", "rwkv", r"tokenizer\.ggml\.model is 'rwkv'"),
    ],
)
def test_tokenizers_that_would_split_otherwise_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, value: str, message: str
) -> None:
    patched(monkeypatch, method, value)
    _, file = written(tmp_path, "llama")
    with pytest.raises(ModelRefused, match=message):
        load_model(str(file))


def test_smollm_splits_digits_which_transformers_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, "add_tokenizer_pre", "smollm")
    _, file = written(tmp_path, "llama")
    tokenizer = Tokenizer.from_file(str(Path(model_folder(str(file))) / "tokenizer.json"))
    assert tokenizer.pre_tokenizer is not None
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a 12")] == ["a", "Ġ", "1", "2"]


@pytest.mark.parametrize(("pre", "ids"), [("llama-bpe", [10]), ("qwen2", [35, 36, 37])])
def test_words_of_the_vocabulary_are_tokens_where_llama_cpp_takes_them_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pre: str, ids: list[int]
) -> None:
    """No merge makes "ABC"."""
    patched(monkeypatch, "add_tokenizer_pre", pre)
    monkeypatch.setattr("gguf_writer.VOCABULARY", [*VOCABULARY[:10], "ABC", *VOCABULARY[11:]])
    _, file = written(tmp_path, "llama")
    assert Tokenizer.from_file(str(Path(model_folder(str(file))) / "tokenizer.json")).encode("ABC").ids == ids


def with_another_architecture(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"llama", b"mamba"))


def with_another_tensor(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"blk.0.attn_norm", b"blk.0.ssm_norms"))


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:20000])


def no_gguf(file: Path) -> None:
    file.write_bytes(b"PK" + bytes(100))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            with_another_architecture,
            r"architecture is .mamba.; of GGUF files, arcee, cohere2, .*, starcoder2 are read",
        ),
        (with_another_tensor, r"its tensor blk\.0\.ssm_norms\.weight is not read"),
        (cut_short, "cannot be read as GGUF"),
        (no_gguf, "cannot be read as GGUF"),
    ],
)
def test_damaged_and_other_files_are_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    _, file = written(tmp_path, "llama")
    damage(file)
    with pytest.raises(ModelRefused, match=message):
        load_model(str(file))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="there is no such file"):
        model_folder(str(tmp_path / "model.gguf"))


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    _, file = written(tmp_path, "llama")
    part = file.rename(tmp_path / "model-00001-of-00002.gguf")
    with pytest.raises(ModelRefused, match=r"model-00002-of-00002\.gguf of its 2 parts is missing"):
        load_model(str(part))
