"""Files of llama.cpp's own converter, served: logits as transformers has them of the model that was converted.

llama_cpp/NAME.gguf was written by convert_hf_to_gguf.py (of xllamacpp 2026.10) from a tiny random model in float16, the
experts of gpt-oss in MXFP4. NAME.safetensors has 60 token_ids and the logits of transformers 5.23 in float32, and as
metadata the model's config.json. deepseek_v2_older is as the converter wrote until April 2025: kv_b whole, the heads'
widths under the general names, no expert_gating_func and no expert groups.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import CachedSequence, run_step
from safetensors import safe_open
from tokenizers import Tokenizer

from outrider.engine.certificate import certify
from outrider.engine.errors import ModelRefused
from outrider.engine.model.coded_weights import code_kinds
from outrider.engine.model.gguf.folder import model_folder
from outrider.engine.model.load import load_model
from outrider.engine.run.runner import ModelRunner
from outrider.kernels.linear import cpu_code_panels

_FOLDER = Path(__file__).parent / "llama_cpp"
_NAMES = sorted(file.stem for file in _FOLDER.glob("*.gguf"))
_TOLERANCE = 1e-5
# Of config.json: what says nothing of the logits, or is said otherwise.
_OTHER_KEYS = {"dtype", "transformers_version", "initializer_range", "use_cache", "eos_token_id", "head_dim"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def expected(name: str) -> tuple[list[int], torch.Tensor, dict[str, Any]]:
    with safe_open(_FOLDER / f"{name}.safetensors", framework="pt") as file:
        token_ids, logits = file.get_tensor("token_ids").tolist(), file.get_tensor("logits")
        return token_ids, logits, json.loads(file.metadata()["config"])


def logits_of(loaded: Any, token_ids: list[int]) -> torch.Tensor:
    runner = ModelRunner(loaded, loaded.make_cache(4, 16))
    return run_step(runner, [CachedSequence(token_ids, [0, 1, 2, 3]).rows(len(token_ids))])[0]


@pytest.mark.parametrize("name", _NAMES)
def test_the_logits_are_those_of_the_converted_model(name: str) -> None:
    token_ids, logits, _ = expected(name)
    loaded = load_model(str(_FOLDER / f"{name}.gguf"), dtype="float32")
    torch.testing.assert_close(logits_of(loaded, token_ids), logits, atol=_TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", _NAMES)
def test_the_config_says_what_the_models_did(name: str) -> None:
    written = json.loads((Path(model_folder(str(_FOLDER / f"{name}.gguf"))) / "config.json").read_text())
    _, _, config = expected(name)
    for key in (written.keys() & config.keys()) - _OTHER_KEYS:
        if isinstance(config[key], float):
            assert written[key] == pytest.approx(config[key], rel=1e-6), key  # float32 in the file
        elif key == "rope_parameters":
            assert written[key] == {part: pytest.approx(value) for part, value in config[key].items()}
        else:
            assert written[key] == config[key], key


@pytest.mark.skipif(not cpu_code_panels.supports(torch.bfloat16), reason="this CPU has no AVX512-BF16")
def test_gpt_oss_experts_stay_packed() -> None:
    token_ids, logits, _ = expected("gpt_oss")
    loaded = load_model(str(_FOLDER / "gpt_oss.gguf"))
    assert code_kinds(loaded.model) == ["i4"]
    certificate = certify(loaded, ModelRunner(loaded, loaded.make_cache(2, 16)))
    assert certificate.holds, certificate.describe()
    errors = (logits_of(loaded, token_ids).float() - logits).square().mean(-1).sqrt()
    assert errors.median() < 0.02 * logits.std()  # a row may choose other experts


def gating(function: int) -> bytes:
    return b"deepseek2.expert_gating_func" + struct.pack("<II", 4, function)  # a value of type uint32


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("deepseek_v3", gating(2), gating(1), "by the softmax, and has expert_weights_norm or exp_probs_b"),
        ("deepseek_v3", gating(2), gating(4), "expert_gating_func is 4"),
        ("deepseek_v3", b"blk.1.attn_k_b", b"blk.1.attn_x_b", r"no tensor blk\.1\.attn_k_b"),
        ("deepseek_v3", b"key_length_mla", b"key_length_mlb", r"has no deepseek2\.attention\.key_length_mla"),
        ("gpt_oss", b"blk.0.ffn_up_exps.weight", b"blk.0.ffn_in_exps.weight", r"no tensor blk\.0\.ffn_up_exps\.weight"),
        ("olmo2", b"olmo2.rope.freq_base", b"olmo2.rope.freq_bass", r"olmo2\.rope\.freq_bass, which is not read"),
    ],
)
def test_files_that_say_something_else_are_refused(
    tmp_path: Path, name: str, old: bytes, new: bytes, message: str
) -> None:
    content = (_FOLDER / f"{name}.gguf").read_bytes()
    assert content.count(old) == 1
    file = tmp_path / "model.gguf"
    file.write_bytes(content.replace(old, new))
    with pytest.raises(ModelRefused, match=message):
        load_model(str(file), dtype="float32")


def test_deepseek_v3_splits_text_as_its_rules_say() -> None:
    folder = Path(model_folder(str(_FOLDER / "deepseek_v3.gguf")))
    pre_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    assert pre_tokenizer is not None
    text = "Hi there 12345 .get(x); ok\n\n  end"
    starts = [start for _, (start, _) in pre_tokenizer.pre_tokenize_str(text)]
    pieces = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    assert pieces == ["Hi", " there", " ", "123", "45", " .", "get", "(x", ");", " ok", "\n\n", " ", " end"]
    assert len(pre_tokenizer.pre_tokenize_str("a语言b")) == 3
