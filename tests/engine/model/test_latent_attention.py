"""Latent attention caches latents, in the memory that is planned for them, where the proof at load holds; and heads
where it does not. That the logits are transformers', and their bits their own: test_architectures, test_row_invariance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from latent_models import LATENT_MODELS
from quantised.packed_writers import CASES, write_model
from tiny_models import HYBRIDS, SERVED, save_tiny_model
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.attention.latent import LatentHeads
from outrider.engine.attention.layer import ATTENTION_NAME, register_attention
from outrider.engine.attention.ops import resolve_attention_ops
from outrider.engine.certificate import certify
from outrider.engine.model.latent_attention import keep_latents
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.run.runner import ModelRunner
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu

MODELS = SERVED | HYBRIDS | LATENT_MODELS
TOKENS = list(range(3, 30))
BLOCKS = [3, 0]
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def deepseek_v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(*MODELS["deepseek_v3"], tmp_path_factory.mktemp("deepseek_v3"))


def new_runner(loaded: LoadedModel) -> ModelRunner:
    return ModelRunner(loaded, loaded.make_cache(4, BLOCK_SIZE), loaded.make_states(1))


def logits_of(runner: ModelRunner) -> torch.Tensor:
    rows = SessionRows(TOKENS, 0, BLOCKS, len(TOKENS), state=StateRows(None, (), 0, len(TOKENS)))
    return runner.forward(build_batch([rows], BLOCK_SIZE)).logits


def eager(folder: Path) -> Any:
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "kimi_linear"])
def test_the_cache_holds_what_transformers_caches(name: str, tmp_path: Path) -> None:
    """Whose own cache has the latent as the key, and the rotated part as the value."""
    folder = save_tiny_model(*MODELS[name], tmp_path)
    loaded = load_model(str(folder))
    runner = new_runner(loaded)
    logits_of(runner)
    with torch.inference_mode():
        theirs = eager(folder)(torch.tensor([TOKENS]), use_cache=True).past_key_values
    attends = [layer for layer in theirs.layers if getattr(layer, "values", None) is not None]
    assert len(attends) == len(runner.cache.layers) == len(loaded.layer_shapes)
    for layer, (keys, values) in zip(attends, runner.cache.layers, strict=True):
        found = keys[BLOCKS, 0].flatten(0, 1)[: len(TOKENS)]
        expected = torch.cat((layer.keys, layer.values), dim=-1)[0, 0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert values.data_ptr() == keys.data_ptr()


def test_a_token_of_deepseek_v3s_latents_takes_1152_bytes_a_layer(tmp_path: Path) -> None:
    """576 numbers in bf16, however many heads; what is planned is what is allocated, and moved as one."""
    name, arguments = MODELS["deepseek_v2"]
    folder = save_tiny_model(name, {**arguments, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, tmp_path)
    loaded = load_model(str(folder), dtype="bfloat16")
    cache = loaded.make_cache(4, BLOCK_SIZE)
    assert loaded.bytes_per_block(BLOCK_SIZE) == 2 * 1152 * BLOCK_SIZE
    assert cache.num_bytes == 4 * loaded.bytes_per_block(BLOCK_SIZE)
    keys, values = cache.layers[1]
    assert keys.untyped_storage().nbytes() < cache.num_bytes / 2 + 100
    keys[2, 0, 5] = torch.arange(576)
    cache.move(torch.tensor([2 * BLOCK_SIZE + 5]), torch.tensor([7]))
    assert torch.equal(keys[0, 0, 7], keys[2, 0, 5])
    assert torch.equal(values[0, 0, 7], keys[2, 0, 5, :512])


def test_expanded_weights_are_freed(deepseek_v3: Path) -> None:
    loaded = load_model(str(deepseek_v3))
    assert not [name for name, _ in loaded.model.named_modules() if "kv_b_proj" in name]
    assert not [name for name, part in loaded.model.named_parameters() if part.ndim == 2 and "self_attn" in name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_certificate_holds(deepseek_v3: Path, dtype: str) -> None:
    loaded = load_model(str(deepseek_v3), dtype=dtype)
    assert all(shape.values_in_keys for shape in loaded.layer_shapes)
    certificate = certify(loaded, new_runner(loaded))
    assert certificate.holds, certificate.describe()


def assert_keeps_heads(loaded: LoadedModel) -> None:
    shapes = {
        (s.num_query_heads, s.num_kv_heads, s.key_dim, s.value_dim, s.values_in_keys) for s in loaded.layer_shapes
    }
    assert shapes == {(32, 32, 20, 20, False)}


def test_a_module_that_computes_something_else_keeps_its_heads(
    deepseek_v3: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Values that are no linear function of the latents, as another release may have: served as they are."""
    right = DeepseekV3Attention.expand_kv

    def bent(self: Any, *latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = right(self, *latents)
        return key, value + 0.01 * value.square()

    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", bent)
    loaded = load_model(str(deepseek_v3))
    assert_keeps_heads(loaded)
    assert "from latents it computes something else" in caplog.text
    with torch.inference_mode():
        expected = eager(deepseek_v3)(torch.tensor([TOKENS]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(new_runner(loaded)), expected, atol=2e-5, rtol=0)


def test_no_error_in_the_proof_stops_a_load(
    deepseek_v3: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_arguments: Any) -> None:
        raise RuntimeError("no such product")

    monkeypatch.setattr(LatentHeads, "absorb", fail)
    loaded = load_model(str(deepseek_v3))
    assert_keeps_heads(loaded)
    assert "its proof raised RuntimeError('no such product')" in caplog.text
    assert bool(torch.isfinite(logits_of(new_runner(loaded))).all())


def test_a_bias_of_the_heads_is_not_dropped(deepseek_v3: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = plain_model(deepseek_v3)
    for layer in model.model.layers:
        projection = layer.self_attn.kv_b_proj
        projection.bias = torch.nn.Parameter(torch.ones(projection.out_features))
    assert run_keep_latents(model, "cpu") == 0
    assert "kv_b_proj has a bias" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_triton_caches_latents_too(tmp_path: Path, dtype: str) -> None:
    """Near the CPU's kernels, and one set of bits for a prompt, its chunks, and drafts as a tree."""
    name, arguments = MODELS["minicpm3"]
    folder = str(save_tiny_model(name, {**arguments, "num_hidden_layers": 1}, tmp_path))
    loaded = load_model(folder, dtype=dtype, device=device().type, attention_backend="triton")
    assert [shape.values_in_keys for shape in loaded.layer_shapes] == [True]
    whole = logits_of(new_runner(loaded))
    near = logits_of(new_runner(load_model(folder, dtype=dtype, device="cpu", attention_backend="cpu")))
    tolerance = 1e-4 if dtype == "float32" else 0.15
    torch.testing.assert_close(whole.float().cpu(), near.float(), rtol=0, atol=tolerance)
    runner, count = new_runner(loaded), len(TOKENS)
    runner.forward(build_batch([SessionRows(TOKENS[:20], 0, BLOCKS, 0)], BLOCK_SIZE))
    chunk = runner.forward(build_batch([SessionRows(TOKENS[20:25], 20, BLOCKS, 5)], BLOCK_SIZE)).logits
    assert torch.equal(chunk, whole[20:25])
    tree = SessionRows([TOKENS[25], 7, TOKENS[26]], 25, BLOCKS, 3, 1, [0, 0])
    drafted = runner.forward(build_batch([SessionRows([5], 0, [2], 1), tree], BLOCK_SIZE)).logits
    assert torch.equal(drafted[[1, 3]], whole[count - 2 :])


def plain_model(folder: Path) -> Any:
    register_attention()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION_NAME).eval()


def run_keep_latents(model: Any, backend: str) -> int:
    def run(token_ids: torch.Tensor, position_ids: torch.Tensor, paged: Any) -> object:
        return model(token_ids, position_ids=position_ids, use_cache=False, paged=paged)

    ops = resolve_attention_ops(backend, torch.device("cpu"))
    return keep_latents(model, ops, max_positions=64, probe=run)


@pytest.mark.parametrize("case", ["ct-w4a16", "ct-fp8-block"])
def test_packed_weights_are_dequantised_for_the_heads(tmp_path: Path, case: str) -> None:
    name, arguments = MODELS["deepseek_v2"]
    widths = {"hidden_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
    own = {"v_head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32}
    plain = save_tiny_model(name, {**arguments, **widths, **own}, tmp_path / "plain")
    linear = r"self_attn\.(q_a_proj|q_b_proj|kv_b_proj|o_proj)\.weight$"
    write_model(plain, CASES[case], tmp_path / "packed", tmp_path / "meant", linear=linear)
    logits = []
    for folder, dtype in (("packed", "bfloat16"), ("meant", "bfloat16"), ("meant", "float32")):
        loaded = load_model(str(tmp_path / folder), dtype=dtype)
        assert [shape.values_in_keys for shape in loaded.layer_shapes] == [True, True]
        logits.append(logits_of(new_runner(loaded)))
    packed_error, meant_error = ((each - logits[2]).abs().mean() for each in logits[:2])
    assert packed_error < 2.0 * meant_error
