"""A whole model on the GPU's kernels, interpreted on the CPU where there is no GPU. Oracle: the same model on the
CPU's kernels, which have their own. Small: an interpreted forward of two layers takes a quarter of a second.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import TINY_LLAMA, save_tiny_model

from outrider.engine.attention.batch import ForwardBatch, SessionRows, build_batch
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.row_buckets import ROW_BUCKETS, Bucket, bucket_of, empty_batch, fill
from outrider.engine.run.runner import ModelRunner
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu

_TOKENS = [(11 * place) % 59 + 1 for place in range(21)]
_BLOCKS = [3, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("LlamaConfig", TINY_LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(folder: Path, request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(str(folder), dtype=request.param, device=device().type, attention_backend="triton")


def _runner(loaded: LoadedModel) -> ModelRunner:
    return ModelRunner(loaded, loaded.make_cache(8))


def _stranger() -> SessionRows:
    return SessionRows(_TOKENS[5:12], 0, [5], 7)


def test_nothing_is_left_to_other_kernels(loaded: LoadedModel) -> None:
    assert loaded.attention_ops.backend == "triton"
    assert loaded.row_invariance is not None
    assert loaded.row_invariance.linear_method == "triton"
    assert loaded.lean is not None
    assert not loaded.lean.left_out


def test_logits_are_those_of_the_cpu_kernels(loaded: LoadedModel, folder: Path) -> None:
    dtype = str(loaded.dtype).removeprefix("torch.")
    other = load_model(str(folder), dtype=dtype, device="cpu", attention_backend="cpu")
    batch = build_batch([SessionRows(_TOKENS, 0, _BLOCKS, 21), _stranger()], 16)
    found, expected = (_runner(model).forward(batch).logits.float().cpu() for model in (loaded, other))
    tolerance = 1e-4 if loaded.dtype == torch.float32 else 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_a_row_keeps_its_bits(loaded: LoadedModel) -> None:
    """One prefill against chunks, single steps beside a stranger, and a path of a tree."""
    prefix, path = _TOKENS[:18], _TOKENS[18:]
    whole = _runner(loaded).forward(build_batch([SessionRows(_TOKENS, 0, _BLOCKS, 4)], 16)).logits
    steps = _runner(loaded)
    steps.forward(build_batch([SessionRows(prefix[:7], 0, _BLOCKS, 0)], 16))
    rows = [steps.forward(build_batch([SessionRows(prefix[7:], 7, _BLOCKS, 1)], 16)).logits[-1]]
    for place, token in enumerate(path):
        batch = build_batch([_stranger(), SessionRows([token], 18 + place, _BLOCKS, 1)], 16)
        rows.append(steps.forward(batch).logits[-1].clone())
    assert torch.equal(torch.stack(rows), whole)
    tree = _runner(loaded)
    tree.forward(build_batch([SessionRows(prefix[:17], 0, _BLOCKS, 0)], 16))
    nodes = [5, path[0], path[1], 9, path[2]]  # the path among siblings
    parents = [0, 0, 2, 2, 3]
    drafted = tree.forward(build_batch([SessionRows([prefix[17], *nodes], 17, _BLOCKS, 6, 1, parents)], 16)).logits
    assert torch.equal(drafted[[0, 2, 3, 5]], whole)


# Attention leaves the outputs of padding as it found them; whatever that is goes through the linears, and numpy warns.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_padding_changes_no_bit(loaded: LoadedModel) -> None:
    """A captured forward computes the padded batch in the place of the batch."""
    sessions = [SessionRows(_TOKENS[:3], 0, [2], 3), SessionRows(_TOKENS[4:6], 0, [6], 2)]
    batch = build_batch(sessions, 16)
    bucket = bucket_of(batch)
    assert bucket == Bucket(8, 32)
    padded = empty_batch(bucket)
    fill(padded, build_batch([SessionRows(_TOKENS[:8], 0, [1], 8)], 16))  # what stood there before leaves no trace
    fill(padded, batch)
    plain, wide = _runner(loaded), _runner(loaded)
    expected = plain.forward(batch).logits
    assert torch.equal(wide.forward(padded).logits[:5], expected)
    for ours, theirs in zip(plain.cache.layers[0], wide.cache.layers[0], strict=True):
        assert torch.equal(ours, theirs)


def test_batches_find_their_bucket() -> None:
    def batch(num_rows: int, num_logits: int, num_blocks: int = 1) -> ForwardBatch:
        return build_batch([SessionRows([1] * num_rows, 0, list(range(num_blocks)), num_logits)], 256)

    for size in ROW_BUCKETS:
        assert bucket_of(batch(size, size)) == Bucket(size, 32)
    assert bucket_of(batch(9, 9, 33)) == Bucket(16, 128)
    assert bucket_of(batch(9, 8)) is None  # a prefill
    assert bucket_of(batch(129, 129)) is None
