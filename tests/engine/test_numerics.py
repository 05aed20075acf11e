"""The measured kind: the same for the same arithmetic, another one for whatever changes a bit of what is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.numerics import measure_numerics
from outrider.engine.sampling import coupling
from outrider.kernels.paged_attention.arguments import BatchTables, Scoring

DEMO_TARGET = Path(__file__).parents[2] / "models" / "demo-target"


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_model(str(DEMO_TARGET), dtype="float32")


@pytest.fixture(scope="module")
def kind(demo: LoadedModel) -> str:
    return measure_numerics(demo)


def test_another_load_is_the_same_kind(kind: str) -> None:
    assert measure_numerics(load_model(str(DEMO_TARGET), dtype="float32")) == kind
    assert kind.startswith("float32/cpu/cpu/tp1/")


def test_another_dtype_is_another_kind(kind: str) -> None:
    other = measure_numerics(load_model(str(DEMO_TARGET), dtype="bfloat16"))
    assert other.startswith("bfloat16/cpu/cpu/tp1/")
    assert other.rpartition("/")[2] != kind.rpartition("/")[2]


def test_a_single_weight_is_seen(kind: str) -> None:
    loaded = load_model(str(DEMO_TARGET), dtype="float32")
    weight = loaded.body().norm.weight  # type: ignore[union-attr]
    with torch.no_grad():
        weight[3] = torch.nextafter(weight[3], torch.tensor(torch.inf))  # type: ignore[index,operator]
    assert measure_numerics(loaded) != kind


@pytest.mark.parametrize("from_position", [0, 64, 1000])
def test_attention_that_differs_from_some_position_on_is_seen(demo: LoadedModel, kind: str, from_position: int) -> None:
    """By one bit of one number a row; far positions are reached without computing what stands before them."""
    sound = demo.attention_ops.paged_attention

    def other(
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        tables: BatchTables,
        scoring: Scoring,
        **options: Any,
    ) -> torch.Tensor:
        attended = sound(query, key_cache, value_cache, tables, scoring, **options)
        if int(tables.context_lens[0]) + query.shape[0] > from_position:
            attended[-1, ..., 0] = torch.nextafter(attended[-1, ..., 0], torch.tensor(torch.inf))
        return attended

    assert measure_numerics(replace(demo, attention_ops=replace(demo.attention_ops, paged_attention=other))) != kind


def test_a_logarithm_of_the_noise_is_seen(demo: LoadedModel, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's logarithms depend on the instruction set, and the sampled token on them."""
    sound = coupling.exponentials

    def other(*args: Any) -> Any:
        noise = sound(*args)
        noise[0] = np.nextafter(noise[0], np.inf)
        return noise

    monkeypatch.setattr(coupling, "exponentials", other)
    assert measure_numerics(demo) != kind
