"""The row-invariance certificate: of the demo target, the demo hybrid, and random models: with latents, and with
packed weights.

Both dtypes, forward by forward and as CUDA graphs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import transformers

from benchmarks.gpu_report.report import Finding, Part, Run, judged
from outrider.engine.certificate import certify
from outrider.engine.model.coded_weights import code_kinds
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from tests.engine.model.quantised.packed_writers import CASES, write_model

_MODELS = Path(__file__).parents[2] / "models"
TARGET, HYBRID = _MODELS / "demo-target", _MODELS / "demo-hybrid"
_NUM_BLOCKS = 64
# DeepSeek-V3's latents, rotated parts and heads; the rest is small.
_LATENT_HEADS = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 512,
}
# Qwen3-8B's heads and groups; the rest is small. Cases of packed_writers.
_PACKED = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
}
_FORMATS = ("gptq-4-v1", "ct-nvfp4", "ct-w8a8", "fp8-block")


def certificate_of(loaded: LoadedModel, name: str, *, graphs: bool) -> Finding:
    """Whether row invariance holds on a loaded model, and where it first does not."""
    runner = ModelRunner(loaded, loaded.make_cache(_NUM_BLOCKS), loaded.make_states(1), graphs=graphs)
    certificate = certify(loaded, runner)
    checks = {check.name: check.holds for check in certificate.checks}
    lean = {} if loaded.lean is None else asdict(loaded.lean)
    return judged(name, "every bit equal", certificate.describe(), certificate.holds, checks=checks, lean=lean)


def _measure(folder: Path, dtype: str, run: Run) -> Iterable[Finding]:
    loaded = load_model(str(folder), dtype=dtype, device=run.device.type)
    for graphs in (False, True):
        yield certificate_of(loaded, _name(folder.name, dtype, graphs=graphs), graphs=graphs)


def _name(model: str, dtype: str, *, graphs: bool) -> str:
    return f"{model}, {dtype}, {'CUDA graphs' if graphs else 'eager'}"


def _measure_latents(dtype: str, run: Run) -> Iterable[Finding]:
    config = transformers.MiniCPM3Config(**_LATENT_HEADS)
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(name)
        loaded = load_model(name, dtype=dtype, device=run.device.type)
        num_latent = sum(shape.values_in_keys for shape in loaded.layer_shapes)
        measured = f"{num_latent} of {len(loaded.layer_shapes)} layers"
        yield judged(f"latents are cached, {dtype}", "every layer", measured, num_latent == len(loaded.layer_shapes))
        for graphs in (False, True):
            yield certificate_of(loaded, _name("latent attention", dtype, graphs=graphs), graphs=graphs)


def _measure_packed(case: str, run: Run) -> Iterable[Finding]:
    with tempfile.TemporaryDirectory() as name:
        plain, packed = Path(name) / "plain", Path(name) / "packed"
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**_PACKED), dtype=torch.float32)
        model.save_pretrained(plain)
        write_model(plain, CASES[case], packed, Path(name) / "meant")
        loaded = load_model(str(packed), dtype="bfloat16", device=run.device.type)
        kinds = code_kinds(loaded.model)
        yield judged(f"weights stay packed, {case}", "one kind of codes", ", ".join(kinds) or "none", len(kinds) == 1)
        for graphs in (False, True):
            yield certificate_of(loaded, _name(f"packed {case}", "bfloat16", graphs=graphs), graphs=graphs)


_DTYPES = ("bfloat16", "float32")
PARTS = [
    *(Part("certificate", f"demo target, {dtype}", 15.0, partial(_measure, TARGET, dtype)) for dtype in _DTYPES),
    *(Part("certificate", f"demo hybrid, {dtype}", 15.0, partial(_measure, HYBRID, dtype)) for dtype in _DTYPES),
    *(Part("certificate", f"latent attention, {dtype}", 15.0, partial(_measure_latents, dtype)) for dtype in _DTYPES),
    *(Part("certificate", f"packed {case}", 10.0, partial(_measure_packed, case)) for case in _FORMATS),
]
