"""Quantised models that stay packed under the GPU's kernels (interpreted where there is no GPU): dense, and a mixture.

Oracle of the logits: transformers in float32 on the weights that were meant. One layer: an interpreted forward of a
few rows takes half a second.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batches import CachedSequence, run_step
from packed_writers import CASES, write_gpt_oss, write_model
from tiny_models import SERVED, save_tiny_model

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.certificate import Certificate, certify
from outrider.engine.model.coded_weights import RowInvariantCodes, code_kinds
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.model.row_invariant_experts import PackedExpert
from outrider.engine.model.row_kernels import resolve_code_kernels
from outrider.engine.numerics import measure_numerics
from outrider.engine.run.runner import ModelRunner
from outrider.shared.sampling_params import SamplingParams
from tests.kernels.triton_device import device
from tests.verifier_service.drafts import faulty_draft, oracle_draft, random_draft
from tests.verifier_service.engine_client import (
    EngineShape,
    generate,
    logprobs_of,
    make_spec,
    running_engine,
    tokens_of,
)

pytestmark = pytest.mark.gpu

_WIDTHS = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
# Every expert has a part in every row: else rounding may send a row elsewhere.
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _WIDTHS,
    "qwen3_moe": {**_WIDTHS, "num_experts": 2, "num_experts_per_tok": 2},
    "gpt_oss": {**_WIDTHS, "num_local_experts": 2, "num_experts_per_tok": 2, "layer_types": ["full_attention"]},
}
_STORM = pytest.mark.storm
_USUAL = [("llama", "ct-w4a16", "i4"), ("qwen3_moe", "fp8-block", "e4m3")]
_OTHERS = [
    ("llama", "gptq-4-v1", "i4"),
    ("llama", "awq", "i4"),
    ("llama", "ct-w8a8", "i8"),
    ("llama", "ct-nvfp4", "i4"),
    ("llama", "ct-mxfp8", "e4m3"),
    ("llama", "fp8-tensor", "e4m3"),
    ("qwen3_moe", "gptq-4-v1", "i4"),
    ("gpt_oss", "ct-mxfp4", "i4"),
]
_TOKENS = [(11 * place) % 59 + 3 for place in range(12)]


def packed_model(folder: Path, architecture: str, case: str) -> Path:
    config, arguments = SERVED[architecture]
    plain = save_tiny_model(config, {**arguments, **_ARCHITECTURES[architecture]}, folder / "plain")
    if architecture == "gpt_oss":
        write_gpt_oss(plain, folder / "packed", folder / "meant")
    else:
        write_model(plain, CASES[case], folder / "packed", folder / "meant")
    return folder / "packed"


def load(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="bfloat16", device=device().type, attention_backend="triton")


def coded(loaded: LoadedModel) -> list[torch.nn.Module]:
    """What multiplies by the weights that the file packs: experts' linears, or a dense layer's."""
    experts = [part for part in loaded.model.modules() if isinstance(part, PackedExpert)]
    if experts:
        return [linear for expert in experts for linear in (expert.up, expert.down)]
    layer: Any = loaded.model.model.layers[0]
    return [layer.self_attn.qkv, layer.self_attn.out, layer.mlp.gate_up, layer.mlp.down]


def require_near_the_exact_logits(loaded: LoadedModel, folder: Path) -> None:
    runner = ModelRunner(loaded, loaded.make_cache(2, 16))
    logits = run_step(runner, [CachedSequence(_TOKENS, [1, 0]).rows(len(_TOKENS))])[0].float().cpu()
    meant = transformers.AutoModelForCausalLM.from_pretrained(folder / "meant", attn_implementation="eager").eval()
    with torch.inference_mode():
        exact = meant(torch.tensor([_TOKENS]), use_cache=False).logits[0]
        rounded = copy.deepcopy(meant).bfloat16()(torch.tensor([_TOKENS]), use_cache=False).logits[0].float()
    ours, theirs = ((found - exact).square().mean().sqrt() for found in (logits, rounded))
    assert ours <= 1.2 * theirs


def require_own_bits(loaded: LoadedModel) -> None:
    """A prompt as a whole; in chunks, and then as the path of a tree beside a stranger."""
    blocks = [1, 0]
    whole_runner, runner = (ModelRunner(loaded, loaded.make_cache(3, 16)) for _ in range(2))
    whole = whole_runner.forward(build_batch([SessionRows(_TOKENS, 0, blocks, 3)], 16)).logits
    runner.forward(build_batch([SessionRows(_TOKENS[:4], 0, blocks, 0)], 16))
    runner.forward(build_batch([SessionRows(_TOKENS[4:9], 4, blocks, 0)], 16))
    tree = [_TOKENS[9], 5, _TOKENS[10], 7, _TOKENS[11]]
    rows = SessionRows(tree, 9, blocks, 5, 1, [0, 0, 2, 2])
    stranger = SessionRows(_TOKENS[2:9], 0, [2], 1)
    found = runner.forward(build_batch([stranger, rows], 16)).logits[1:]
    assert torch.equal(found[[0, 2, 4]], whole)


@pytest.mark.parametrize(
    ("architecture", "case", "kind"), [*_USUAL, *(pytest.param(*other, marks=_STORM) for other in _OTHERS)]
)
def test_a_packed_model_is_near_the_exact_logits(tmp_path: Path, architecture: str, case: str, kind: str) -> None:
    loaded = load(packed_model(tmp_path, architecture, case))
    assert code_kinds(loaded.model) == [kind]
    assert all(isinstance(linear, RowInvariantCodes) for linear in coded(loaded))
    assert loaded.lean is not None
    assert loaded.lean.is_whole or architecture != "llama"
    require_near_the_exact_logits(loaded, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "case"), [("llama", "ct-w4a16"), *(pytest.param(*other[:2], marks=_STORM) for other in _OTHERS)]
)
def test_rows_keep_their_bits(tmp_path: Path, architecture: str, case: str) -> None:
    require_own_bits(load(packed_model(tmp_path, architecture, case)))


def require_one_output(loaded: LoadedModel, certificate: Certificate) -> None:
    """Greedy: without drafts, with right and wrong ones; sampled: with right beginnings. Also the log-probabilities."""
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, num_logprobs=1)
    for params in (greedy, replace(greedy, temperature=0.8, seed=5)):
        spec = make_spec(_TOKENS, params)
        with running_engine(loaded, certificate, EngineShape(num_blocks=20, prefix_caching=False)) as engine:
            plain = generate(engine, spec)
            right = tokens_of(plain)
            assert len(right) == 6
            drafts = (faulty_draft(right, 3),) if params.temperature else (oracle_draft(right, 4), random_draft(1))
            for draft in drafts:
                found = generate(engine, spec, draft)
                assert sum(commit.num_draft_tokens for commit in found) > 0
                assert tokens_of(found) == right
                assert logprobs_of(found) == logprobs_of(plain)


@_STORM
def test_the_certificate_holds_and_speculation_changes_nothing(tmp_path: Path) -> None:
    loaded = load(packed_model(tmp_path, "llama", "gptq-4-v1"))
    certificate = certify(loaded, ModelRunner(loaded, loaded.make_cache(2, 16)))
    assert certificate.holds, certificate.describe()
    assert measure_numerics(loaded).startswith(f"bfloat16+i4/{loaded.device.type}/triton/")
    require_one_output(loaded, certificate)


@pytest.mark.parametrize("kind", ["cuda", device().type])
def test_the_gpus_kernels_take_bfloat16_on_their_devices(kind: str) -> None:
    on = torch.device(kind)
    kernels = resolve_code_kernels("triton", torch.bfloat16, on)
    assert kernels is not None
    assert (kernels.backend, kernels.device) == ("triton", on)
    assert resolve_code_kernels("triton", torch.float32, on) is None
    assert resolve_code_kernels("cpu", torch.bfloat16, torch.device("cuda")) is None


def test_float32_is_not_packed(tmp_path: Path) -> None:
    folder = packed_model(tmp_path, "llama", "ct-w4a16")
    loaded = load_model(str(folder), dtype="float32", device=device().type, attention_backend="triton")
    assert code_kinds(loaded.model) == []
