"""Loading Llama 4: what is adapted, what is proved, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama4 import modeling_llama4

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.errors import ModelRefused
from outrider.engine.model.llama4 import adapt as llama4
from outrider.engine.model.llama4.attention import QueryScale
from outrider.engine.model.load import load_model
from outrider.engine.run.runner import ModelRunner
from outrider.engine.tensor_parallel.plan import read_plan
from tests.engine.lean_models import LEAN_MODELS
from tests.engine.tiny_models import SERVED, save_tiny_model

TOKENS = list(range(3, 43))
TOLERANCE = 2e-5


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_tiny_model(*SERVED["llama4"], tmp_path)


def logits_of(path: Path, **options: Any) -> torch.Tensor:
    loaded = load_model(str(path), **options)
    tokens = TOKENS[: loaded.max_model_len]
    runner = ModelRunner(loaded, loaded.make_cache(4, 16))
    return runner.forward(build_batch([SessionRows(tokens, 0, [3, 0, 2], len(tokens))], 16)).logits


@torch.inference_mode()
def expected_logits(model: Any, num_tokens: int = len(TOKENS)) -> torch.Tensor:
    logits: torch.Tensor = model.eval()(torch.tensor([TOKENS[:num_tokens]]), use_cache=False).logits[0]
    return logits


def eager(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")


@pytest.mark.parametrize("options", [{"lean": False}, {"row_invariant": False}, {"attention_backend": "reference"}])
def test_every_way_to_load_it_computes_the_same(checkpoint: Path, options: dict[str, Any]) -> None:
    found = logits_of(checkpoint, **options)
    torch.testing.assert_close(found, expected_logits(eager(checkpoint)), atol=TOLERANCE, rtol=0)


def test_lean_attention_stands_in_only_where_no_query_is_scaled(tmp_path: Path) -> None:
    path = save_tiny_model(*LEAN_MODELS["lean_llama4"], tmp_path)
    for max_model_len, num_lean in ((40, 0), (7, 1)):
        loaded = load_model(str(path), max_model_len=max_model_len)
        assert loaded.lean is not None
        assert loaded.lean.num_attentions == num_lean
        expected = expected_logits(eager(path), max_model_len)
        torch.testing.assert_close(logits_of(path, max_model_len=max_model_len), expected, atol=TOLERANCE, rtol=0)


def test_another_scale_of_queries_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueryScale, "at", lambda self, positions: 1.0 + self.strength * positions.float())
    with pytest.raises(ModelRefused, match=r"Llama4TextAttention is not the module .*: its queries are scaled"):
        load_model(str(checkpoint))


def test_scores_that_scale_the_output_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(rows)
        outputs = self.experts(rows.repeat(self.num_experts, 1)).view(self.num_experts, *rows.shape)
        return self.shared_expert(rows) + (outputs * scores.t()[..., None]).sum(0), logits

    monkeypatch.setattr(modeling_llama4.Llama4TextMoe, "forward", forward)
    with pytest.raises(ModelRefused, match=r"Llama4TextMoe is not the module .*: the outputs differ"):
        load_model(str(checkpoint))


def test_chunks_that_stay_in_the_mask_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama4, "adapt", lambda *_: None)
    with pytest.raises(ModelRefused, match="chunks of None, its config says 7"):
        load_model(str(checkpoint))
    assert load_model(str(checkpoint), max_model_len=7).max_model_len == 7


def test_tensor_parallelism_is_refused(checkpoint: Path) -> None:
    model = load_model(str(checkpoint), row_invariant=False).model
    with pytest.raises(ModelRefused, match="asks for packed_rowwise, which is not known here"):
        read_plan(str(checkpoint), model)
