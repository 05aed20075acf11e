"""Quantised weights that stay packed: the same bits in any company, and logits as near to the exact ones as bfloat16's.

Oracle of the logits: transformers in float32 on the dequantised weights, which other tests hold to the bit.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batches import CachedSequence, run_step
from gguf_models import gguf_model
from gguf_writer import VOCABULARY

from outrider.engine.certificate import certify
from outrider.engine.errors import ModelRefused
from outrider.engine.model.coded_weights import CodedRows, RowInvariantCodes, code_kinds
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.model.row_invariant_experts import PackedExpert
from outrider.engine.model.row_invariant_modules import RowInvariantLinear
from outrider.engine.numerics import measure_numerics
from outrider.engine.run.runner import ModelRunner
from outrider.kernels.linear import cpu_code_panels
from outrider.kernels.linear.int8 import cpu_panels as int8_panels
from tests.kernels.test_code_panels import kind_here

pytestmark = pytest.mark.skipif(not cpu_code_panels.supports(torch.bfloat16), reason="no bf16 panels here")
_LENGTH = 60
# arithmetic -> error of logits at most, in those of bfloat16 throughout
_ERRORS = {"bf16": 1.2, "int8": 3.0}
# model -> (type of the matrices, types of others)
KINDS: dict[str, tuple[str, str, dict[str, str]]] = {
    "i8": ("llama", "Q8_0", {}),
    "i4": ("llama", "Q4_0", {}),
    "i4-minimums": ("llama", "Q4_1", {}),
    "biases-tied": ("llama-biases-tied", "Q4_0", {"token_embd": "Q8_0"}),
    "scaled-embedding-tied": ("gemma3", "Q4_1", {"token_embd": "Q8_0"}),
    "mixed": ("qwen2", "Q5_0", {"attn_v": "Q8_0", "ffn_down": "Q4_1", "token_embd": "Q5_1"}),
    "some-plain": ("qwen3", "Q8_0", {"attn_k": "F16", "output.weight": "F16"}),
}


def packed_file(folder: Path, name: str) -> Path:
    model, kind, others = KINDS[name]
    return gguf_model(folder, model, kind, None, others)[1]


def logits_of(loaded: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    runner = ModelRunner(loaded, loaded.make_cache(4, 16))
    return run_step(runner, [CachedSequence(token_ids, [0, 1, 2, 3]).rows(len(token_ids))])[0].float()


def dequantised(path: Path, folder: Path) -> Any:
    """transformers' own model in float32 with the dequantised weights."""
    original = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    original.load_state_dict(load_model(str(path), dtype="float32", row_invariant=False).model.state_dict())
    return original


@pytest.mark.parametrize("arithmetic", _ERRORS)
@pytest.mark.parametrize("name", KINDS)
def test_a_packed_model_is_certified_and_near_the_exact_logits(tmp_path: Path, name: str, arithmetic: str) -> None:
    if arithmetic == "int8" and not int8_panels.supports(torch.bfloat16):
        pytest.skip("this CPU has no AVX2")
    file = packed_file(tmp_path, name)
    loaded = load_model(str(file), packed_arithmetic=arithmetic)
    assert all(kind.endswith("a8") == (arithmetic == "int8") for kind in code_kinds(loaded.model))
    linears = [part for part in loaded.model.modules() if isinstance(part, RowInvariantLinear)]
    plain = [part for part in linears if not isinstance(part, RowInvariantCodes)]
    if name == "some-plain":  # its neighbours are packed, and not joined with it
        assert len(plain) == 2 * loaded.num_layers + 1
    else:
        assert not plain
        assert loaded.lean is not None
        assert loaded.lean.is_whole
    assert isinstance(loaded.model.get_input_embeddings().weight, CodedRows)
    certificate = certify(loaded, ModelRunner(loaded, loaded.make_cache(2, 16)))
    assert certificate.holds, certificate.describe()
    token_ids = torch.randint(3, len(VOCABULARY), (_LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    original = dequantised(file, tmp_path / "original")
    with torch.inference_mode():
        exact = original(torch.tensor([token_ids]), use_cache=False).logits[0]
        rounded = copy.deepcopy(original).bfloat16()(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    ours = (logits_of(loaded, token_ids) - exact).square().mean().sqrt()
    theirs = (rounded - exact).square().mean().sqrt()
    assert ours <= _ERRORS[arithmetic] * theirs


@pytest.mark.parametrize(
    ("name", "kind", "others"),
    [("qwen3moe", "Q4_1", {"ffn_up_exps": "Q8_0"}), ("qwen3moe", "MXFP4", {}), ("mixtral", "Q5_0", {})],
)
def test_experts_stay_packed(tmp_path: Path, name: str, kind: str, others: dict[str, str]) -> None:
    """A row with a single 1 brings out an input's weights, each rounded once."""
    folder, file = gguf_model(tmp_path, name, kind, None, others)
    loaded = load_model(str(file), packed_arithmetic="bf16")
    assert loaded.dtype == torch.bfloat16
    packed = [part for part in loaded.model.modules() if isinstance(part, PackedExpert)]
    meant = [
        weight
        for layer in dequantised(file, folder).model.layers
        for weight in zip(layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj, strict=True)
    ]
    assert len(packed) == len(meant) == 4 * loaded.num_layers
    for expert, weights in zip(packed, meant, strict=True):
        for linear, weight in zip((expert.up, expert.down), weights, strict=True):
            assert isinstance(linear, RowInvariantCodes)
            found = linear(torch.eye(linear.in_features, dtype=torch.bfloat16))
            assert torch.equal(found, weight.T.bfloat16())
    certificate = certify(loaded, ModelRunner(loaded, loaded.make_cache(2, 16)))
    assert certificate.holds, certificate.describe()


def test_a_recorded_forward_has_the_same_bits(tmp_path: Path) -> None:
    loaded = load_model(str(packed_file(tmp_path, "mixed")))
    recording, plain = (ModelRunner(loaded, loaded.make_cache(4, 16), graphs=graphs) for graphs in (True, False))
    sequences = [CachedSequence([3 + 7 * place % 90 for place in range(_LENGTH)], [0, 1, 2, 3]) for _ in range(2)]
    while sequences[0].num_cached < _LENGTH:
        found, expected = (
            run_step(runner, [sequence.rows(3)])[0]
            for runner, sequence in zip((recording, plain), sequences, strict=True)
        )
        assert torch.equal(found, expected)
    graphs: Any = recording._graphs
    assert graphs._recorded


def test_a_tied_weight_is_held_once(tmp_path: Path) -> None:
    loaded = load_model(str(packed_file(tmp_path, "biases-tied")))
    rows = loaded.model.get_input_embeddings().weight
    head = loaded.model.get_output_embeddings()
    assert head.packed is rows.packed
    assert rows.untyped_storage().nbytes() == 2
    assert not [name for name, parameter in loaded.model.named_parameters() if parameter.ndim > 1]


def test_an_embedding_has_the_dequantised_rows(tmp_path: Path) -> None:
    file = packed_file(tmp_path, "scaled-embedding-tied")
    found = load_model(str(file)).model.get_input_embeddings()
    plain = load_model(str(file), row_invariant=False).model.get_input_embeddings()
    token_ids = torch.tensor([[0, 97, 5], [5, 64, 63]])
    assert torch.equal(found(token_ids), plain(token_ids))


def test_the_numerics_name_the_kinds(tmp_path: Path) -> None:
    file = str(packed_file(tmp_path, "mixed"))
    kinds = ",".join(sorted({kind_here(kind) for kind in ("i4", "i5", "i8")}))
    assert measure_numerics(load_model(file, packed_arithmetic="bf16")).startswith(f"bfloat16+{kinds}/cpu/")
    if int8_panels.supports(torch.bfloat16):
        assert measure_numerics(load_model(file)).startswith("bfloat16+w4a8,w5a8,w8a8/cpu/")


def test_float32_is_not_packed(tmp_path: Path) -> None:
    loaded = load_model(str(packed_file(tmp_path, "i8")), dtype="float32")
    assert not any(isinstance(part, RowInvariantCodes) for part in loaded.model.modules())
    assert measure_numerics(loaded).startswith("float32/cpu/")


def test_a_packed_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    file = packed_file(tmp_path, "i8")
    folder = Path(load_model(str(file)).path)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"intermediate_size": 96', '"intermediate_size": 64'))
    with pytest.raises(ModelRefused, match=r"down_proj\.weight has shape \[64, 96\], not \[64, 64\]"):
        load_model(str(folder))
