"""Files of llama.cpp's own converter, served: logits as transformers has them of the model that was converted.

llama_cpp/NAME.gguf was written by convert_hf_to_gguf.py (of xllamacpp 2026.10) from a tiny random model in float16, the
experts of gpt-oss in MXFP4. NAME.safetensors has 60 token_ids and the logits of transformers 5.23 in float32, and as
metadata the model's config.json. deepseek_v2_older is as the converter wrote until April 2025: kv_b whole, the heads'
widths under the general names, no expert_gating_func and no expert groups.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import CachedSequence, run_step
from safetensors import safe_open

from outrider.engine.certificate import certify
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
