"""The start-up certificate holds on sound models and names the operation where one is broken on purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lean_models import LEAN_MODELS
from tiny_models import SERVED, save_tiny_model

from outrider.engine.certificate import certify
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(*SERVED["llama"], tmp_path_factory.mktemp("llama"))


def certify_fresh(loaded: LoadedModel, block_size: int = 16) -> Any:
    return certify(loaded, ModelRunner(loaded, loaded.make_cache(2, block_size)))


SOUND = ("llama", "mixtral", "gemma2", "gpt2", "gpt_oss", "lean_llama", "lean_gemma2", "lean_mixtral")


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_holds_on_sound_models(name: str, dtype: str, tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny_model(*(SERVED | LEAN_MODELS)[name], tmp_path)), dtype=dtype)
    runner = ModelRunner(loaded, loaded.make_cache(2, 8))
    runner.cache.layers[0][0].fill_(3.0)
    certificate = certify(loaded, runner)
    assert certificate.holds, certificate.describe()
    assert len(certificate.checks) == 6
    assert certificate.failing_operation is None
    assert "holds to the bit" in certificate.describe()
    assert bool((runner.cache.layers[0][0] == 3.0).all()), "the certificate must leave the runner's cache alone"


def test_names_a_linear_that_was_not_replaced(llama: Path) -> None:
    loaded = load_model(str(llama))
    stock = load_model(str(llama), row_invariant=False)
    loaded.model.model.layers[1].mlp.down_proj = stock.model.model.layers[1].mlp.down_proj
    certificate = certify_fresh(loaded)
    assert not certificate.holds
    assert certificate.failing_operation == "model.layers.1.mlp.down_proj at position 70"
    assert "one row against many" in certificate.describe()


def test_names_a_norm_that_looks_at_the_batch(llama: Path) -> None:
    loaded = load_model(str(llama))
    norm = loaded.model.model.layers[0].post_attention_layernorm
    original = norm.forward
    norm.forward = lambda x: original(x) + 1e-3 * x.amax(dim=1, keepdim=True)
    certificate = certify_fresh(loaded)
    assert not certificate.holds
    assert "model.layers.0.post_attention_layernorm" in str(certificate.failing_operation)


def test_names_attention_whose_last_row_differs(llama: Path) -> None:
    loaded = load_model(str(llama))
    sound = loaded.attention_ops.paged_attention

    def place_dependent(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attended = sound(query, *args, **kwargs)
        if query.shape[0] > 1:
            attended[-1] *= 1 + 2**-20
        return attended

    broken = replace(loaded, attention_ops=replace(loaded.attention_ops, paged_attention=place_dependent))
    certificate = certify_fresh(broken)
    assert not certificate.holds
    assert str(certificate.failing_operation).startswith("paged attention")


def test_names_the_head(llama: Path) -> None:
    loaded = load_model(str(llama))
    stock = load_model(str(llama), row_invariant=False)
    loaded.model.lm_head = stock.model.lm_head
    certificate = certify_fresh(loaded)
    assert not certificate.holds
    assert certificate.failing_operation == "lm_head at position 70"
