"""Which modules give way to lean ones, that the model still says the same, and that impostors are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from batches import CachedSequence, run_step
from lean_models import LEAN_MODELS
from tiny_models import SERVED, VOCAB_SIZE, save_tiny_model
from transformers import LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from outrider.engine.model.lean.lean_mlp import find_activation
from outrider.engine.model.lean.lean_norm import lean_norm
from outrider.engine.model.lean.lean_rotary import LeanRotaryEmbedding, lean_rotary
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.model.row_kernels import resolve_row_kernels
from outrider.engine.run.runner import ModelRunner

# name -> attention modules, MLPs, norms, rotary embeddings that give way (2 layers each), in fp32.
EXPECTED = {
    "lean_llama": (2, 2, 5, 1),
    "lean_llama_tied": (2, 2, 5, 1),
    "lean_qwen3": (2, 2, 9, 1),
    "lean_olmo2": (2, 2, 9, 1),
    "lean_gemma2": (2, 2, 9, 1),
    "lean_gemma3_text": (2, 2, 13, 1),
    "lean_phi3": (2, 2, 5, 1),
    "lean_phi": (2, 0, 0, 1),
    "lean_smollm3": (2, 2, 5, 1),
    "lean_mixtral": (2, 0, 5, 1),
    "lean_gpt_oss": (0, 0, 5, 1),
    "lean_cohere": (0, 2, 0, 1),
    "lean_gpt_neox": (0, 0, 0, 1),
    "opt": (0, 0, 0, 0),
}


def _load(name: str, directory: Path, dtype: str = "float32", *, lean: bool = True) -> LoadedModel:
    if not directory.exists():
        save_tiny_model(*(SERVED | LEAN_MODELS)[name], directory)
    return load_model(str(directory), dtype=dtype, lean=lean)


def _logits(loaded: LoadedModel) -> torch.Tensor:
    runner = ModelRunner(loaded, loaded.make_cache(8, 8))
    token_ids = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    sequence = CachedSequence(token_ids, [5, 2, 7, 1, 3])
    return torch.cat([run_step(runner, [sequence.rows(count)])[0] for count in (21, 1, 1, 5, 12)])


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_report_says_what_gave_way(name: str, tmp_path: Path) -> None:
    report = _load(name, tmp_path / name).lean
    assert report is not None
    counts = (report.num_attentions, report.num_mlps, report.num_norms, report.num_rotary_embeddings)
    assert counts == EXPECTED[name]
    if name in ("lean_llama", "lean_phi3", "lean_gemma2", "lean_mixtral"):  # the last has experts, no MLPs
        assert report.left_out == {}
    if name in ("lean_phi", "lean_gpt_oss", "lean_cohere", "opt"):
        assert report.left_out != {}
    for class_name in report.left_out:
        assert class_name in report.describe()


@pytest.mark.parametrize("name", sorted(LEAN_MODELS))
def test_bf16_logits_are_those_of_the_models_own_modules(name: str, tmp_path: Path) -> None:
    """Every rounding step is transformers' own and only the sums of norms are added up in another order, so most logits
    have the same bits (afmoe: 0.72 of them where attention rounds its weights to bf16); fp32 is compared in
    test_architectures."""
    ours = _logits(_load(name, tmp_path / name, "bfloat16"))
    theirs = _logits(_load(name, tmp_path / name, "bfloat16", lean=False))
    assert (ours == theirs).float().mean() > 0.6
    torch.testing.assert_close(ours, theirs, atol=0.05 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("check", "kind"),
    [
        ("make_lean.lean_norm", "LlamaRMSNorm"),
        ("lean_attention.finds_rotation", "LlamaAttention"),
        ("lean_attention.agree", "LlamaAttention"),
        ("make_lean.find_activation", "LlamaMLP"),
        ("make_lean.lean_rotary", "LlamaRotaryEmbedding"),
    ],
)
def test_a_check_that_raises_leaves_its_modules_with_one_line(
    check: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(*_args: object, **_options: object) -> None:
        raise ZeroDivisionError("on purpose")

    theirs = _logits(_load("lean_llama", tmp_path / "llama", lean=False))
    monkeypatch.setattr(f"outrider.engine.model.lean.{check}", raises)
    loaded = _load("lean_llama", tmp_path / "llama")
    assert loaded.lean is not None
    assert list(loaded.lean.left_out) == [kind]
    said = [record.getMessage() for record in caplog.records if "on purpose" in record.getMessage()]
    assert len(said) == 1
    assert kind in said[0]
    torch.testing.assert_close(_logits(loaded), theirs, atol=2e-5, rtol=0)


def test_a_scale_that_begins_at_a_later_position_is_seen(tmp_path: Path) -> None:
    """At the first positions ministral3's attention is llama's."""
    report = _load("lean_ministral3", tmp_path / "ministral3").lean
    assert report is not None
    assert report.left_out == {"Ministral3Attention": 2}


def test_a_rotary_embedding_of_complex_numbers_stays(tmp_path: Path) -> None:
    report = _load("lean_deepseek_v2", tmp_path / "deepseek_v2").lean
    assert report is not None
    assert report.num_rotary_embeddings == 0
    assert report.left_out["DeepseekV2RotaryEmbedding"] == 1


def test_no_second_copy_of_a_weight_is_kept(tmp_path: Path) -> None:
    loaded = _load("lean_llama", tmp_path / "llama")
    matrices = [name for name, parameter in loaded.model.named_parameters() if parameter.ndim == 2]
    assert matrices == ["model.embed_tokens.weight"]


def test_lean_off_keeps_every_module(tmp_path: Path) -> None:
    loaded = _load("lean_llama", tmp_path / "llama", lean=False)
    assert loaded.lean is None
    assert type(loaded.model.model.norm) is LlamaRMSNorm


def test_olmo2_rotates_in_fp32_which_the_stand_in_does_not(tmp_path: Path) -> None:
    report = _load("lean_olmo2", tmp_path / "olmo2", "bfloat16").lean
    assert report is not None
    assert report.left_out == {"Olmo2Attention": 2}


class _ScaledRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 1.1 * super().forward(hidden_states)  # type: ignore[no-any-return]


class _ForgetfulRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.variance_epsilon = 0.0
        return super().forward(hidden_states)  # type: ignore[no-any-return]


def test_norms_are_known_by_what_they_compute() -> None:
    kernels = resolve_row_kernels("cpu")
    llama, gemma = lean_norm(LlamaRMSNorm(64), kernels), lean_norm(Gemma2RMSNorm(64), kernels)
    assert llama is not None
    assert (llama.one_plus_weight, llama.rounds_first) == (False, True)
    assert gemma is not None
    assert (gemma.one_plus_weight, gemma.rounds_first) == (True, False)
    for impostor in (_ScaledRMSNorm(64), _ForgetfulRMSNorm(64), LlamaRMSNorm(20), torch.nn.LayerNorm(64)):
        assert lean_norm(impostor, kernels) is None


class _ClippedMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(max=1.0))  # type: ignore[no-any-return]


def _mlp(kind: type[LlamaMLP], activation: str) -> LlamaMLP:
    return kind(LlamaConfig(hidden_size=64, intermediate_size=96, hidden_act=activation, mlp_bias=True))


@pytest.mark.parametrize(
    ("kind", "activation", "found"),
    [
        (LlamaMLP, "silu", "silu"),
        (LlamaMLP, "gelu_pytorch_tanh", "gelu_tanh"),
        (LlamaMLP, "gelu", None),
        (LlamaMLP, "relu", None),
        (_ClippedMLP, "silu", None),
    ],
)
@torch.inference_mode()
def test_mlps_are_known_by_what_they_compute(kind: type[LlamaMLP], activation: str, found: str | None) -> None:
    mlp = _mlp(kind, activation)
    generator = torch.Generator().manual_seed(0)
    for parameter in mlp.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    assert find_activation(mlp, resolve_row_kernels("cpu")) == found


def test_a_rotary_table_holds_what_the_module_computes() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=512)
    original = LlamaRotaryEmbedding(config)
    table = lean_rotary(original, [], 100, torch.bfloat16)
    assert isinstance(table, LeanRotaryEmbedding)
    x = torch.zeros(1, dtype=torch.bfloat16)
    # Beyond the table's end, and in another dtype, the module itself is asked.
    for positions, rows in (([3, 99, 0, 3], x), ([98, 99, 100, 400], x), ([1, 2], x.float())):
        position_ids = torch.tensor([positions])
        for ours, theirs in zip(table(rows, position_ids=position_ids), original(rows, position_ids), strict=True):
            assert torch.equal(ours, theirs)
