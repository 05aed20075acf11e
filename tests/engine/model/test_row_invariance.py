"""A row's logits, to the bit, whatever else is in the forward and however its context got into the cache.

The yardstick is plain decoding, one token per forward. Nothing here has a tolerance.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from batches import CachedSequence, run_step, scattered_blocks
from latent_models import LATENT_MODELS, LATENT_PARAMS
from lean_models import LEAN_MODELS
from tiny_models import SERVED, VOCAB_SIZE, save_tiny_model

from outrider.engine.attention.batch import SessionRows
from outrider.engine.model.load import load_model
from outrider.engine.model.row_invariant_modules import RowInvariantActivation, apply_in_whole_vectors
from outrider.engine.run.runner import ModelRunner
from outrider.kernels.linear import cpu, cpu_panels, reference
from outrider.kernels.linear.row_invariant import padded_linear

BLOCK_SIZE = 4
NUM_TOKENS = 24
NUM_BLOCKS = 60
MODELS = SERVED | LEAN_MODELS | LATENT_MODELS
EACH_MODEL = [*sorted(SERVED), *sorted(LEAN_MODELS), *LATENT_PARAMS]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=EACH_MODEL)
def runner(request: pytest.FixtureRequest, dtype: str, checkpoints: Path) -> ModelRunner:
    directory = checkpoints / request.param
    if not directory.exists():
        save_tiny_model(*MODELS[request.param], directory)
    loaded = load_model(str(directory), dtype=dtype)
    return ModelRunner(loaded, loaded.make_cache(NUM_BLOCKS, BLOCK_SIZE))


def random_tokens(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def in_chunks(runner: ModelRunner, token_ids: list[int], block_ids: list[int], size: int) -> torch.Tensor:
    """Logits of every token, `size` tokens per forward, alone."""
    sequence = CachedSequence(token_ids, block_ids)
    steps = []
    while sequence.num_cached < len(token_ids):
        steps += run_step(runner, [sequence.rows(size)])
    return torch.cat(steps)


def in_company(runner: ModelRunner, token_ids: list[int], blocks: list[list[int]], place: int) -> torch.Tensor:
    """Logits of every token, its forwards of 1 to 6 rows shared with four strangers."""
    sequence = CachedSequence(token_ids, blocks[0])
    strangers = [CachedSequence(random_tokens(NUM_TOKENS * 2, 10 + i), blocks[1 + i]) for i in range(4)]
    kept = []
    for step, size in enumerate((1, 6, 2, 5, 1, 4, 3, 2)):
        rows = [stranger.rows(1 + (step + i * 3) % 7) for i, stranger in enumerate(strangers)]
        rows.insert(place, sequence.rows(size))
        kept.append(run_step(runner, rows)[place])
    assert sequence.num_cached == NUM_TOKENS
    return torch.cat(kept)


def as_tree(runner: ModelRunner, token_ids: list[int], block_ids: list[int]) -> torch.Tensor:
    """Logits of the last six tokens, standing in a tree between rejected siblings."""
    cached = len(token_ids) - 7
    run_step(runner, [SessionRows(token_ids[:cached], 0, block_ids, 0)])
    siblings = random_tokens(6, 77)
    # Row 0 is the chain; the path's k-th token is row 2k, its sibling row 2k - 1, both below row 2k - 2.
    tree = [token for pair in zip(siblings, token_ids[-6:], strict=True) for token in pair]
    parents = [parent for depth in range(6) for parent in (2 * depth, 2 * depth)]
    rows = SessionRows([token_ids[cached], *tree], cached, block_ids, 12, num_chain_rows=1, parents=parents)
    return run_step(runner, [rows])[0][1::2]


def test_a_rows_bits_are_its_own(runner: ModelRunner) -> None:
    token_ids = random_tokens(NUM_TOKENS, 1)
    blocks = scattered_blocks(NUM_BLOCKS, 4 + 1)
    decoded = in_chunks(runner, token_ids, blocks[0], 1)
    assert torch.isfinite(decoded).all()
    assert torch.unique(decoded, dim=0).shape[0] == NUM_TOKENS, "rows that are all alike prove nothing"
    for size in (NUM_TOKENS, 7, 6):
        assert torch.equal(in_chunks(runner, token_ids, blocks[1], size), decoded), f"in chunks of {size}"
    for place in range(5):
        assert torch.equal(in_company(runner, token_ids, blocks, place), decoded), f"at place {place} of 5"
    assert torch.equal(as_tree(runner, token_ids, blocks[2]), decoded[-6:]), "as a path of a tree"


def test_bits_do_not_depend_on_the_number_of_threads(checkpoints: Path) -> None:
    """Another replica of the same kind may have more cores."""
    directory = save_tiny_model(*SERVED["llama"], checkpoints / "threads")
    token_ids, before = random_tokens(NUM_TOKENS, 1), torch.get_num_threads()
    logits: dict[int, torch.Tensor] = {}
    try:
        for num_threads in (1, 2):
            loaded = load_model(str(directory), dtype="float32", num_threads=num_threads)
            runner = ModelRunner(loaded, loaded.make_cache(NUM_BLOCKS, BLOCK_SIZE))
            logits[num_threads] = in_chunks(runner, token_ids, scattered_blocks(NUM_BLOCKS, 2)[0], 5)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(logits[1], logits[2])


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_plain_weights_are_freed_unless_they_are_shared(name: str, tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny_model(*SERVED[name], tmp_path)))
    matrices = [key for key, parameter in loaded.model.named_parameters() if parameter.ndim == 2]
    assert matrices == ["model.embed_tokens.weight"]
    assert loaded.row_invariance is not None
    assert loaded.row_invariance.num_linears == 2 * 7 + 1
    assert loaded.row_invariance.num_activations == 2


def test_the_fallback_linear_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = str(save_tiny_model(*SERVED["mixtral"], tmp_path))
    token_ids = random_tokens(NUM_TOKENS, 1)
    logits = []
    for method in ("onednn-prepacked", "padded-8"):
        monkeypatch.setattr(cpu, "supports", lambda _dtype, method=method: method == "onednn-prepacked")
        loaded = load_model(directory)
        assert loaded.row_invariance is not None
        assert loaded.row_invariance.linear_method == method
        runner = ModelRunner(loaded, loaded.make_cache(NUM_BLOCKS, BLOCK_SIZE))
        logits.append(in_chunks(runner, token_ids, scattered_blocks(NUM_BLOCKS, 2)[0], 7))
    torch.testing.assert_close(logits[0], logits[1], atol=2e-5, rtol=0)


def test_stock_modules_do_move_bits(checkpoints: Path) -> None:
    """The test above can fail: without our modules it does."""
    directory = save_tiny_model(*SERVED["llama"], checkpoints / "stock")
    loaded = load_model(str(directory), dtype="float32", row_invariant=False)
    stock = ModelRunner(loaded, loaded.make_cache(NUM_BLOCKS, BLOCK_SIZE))
    token_ids, blocks = random_tokens(NUM_TOKENS, 1), scattered_blocks(NUM_BLOCKS, 2)
    one_by_one = in_chunks(stock, token_ids, blocks[0], 1)
    assert not torch.equal(one_by_one, in_chunks(stock, token_ids, blocks[1], 6))


def cancelling(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x and weight whose products cancel in half of the rows: what is left shows the order of summation."""
    generator = torch.Generator().manual_seed(num_inputs)
    half = num_inputs // 2
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    weight[:, half : 2 * half] = weight[:, :half]
    x = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
    x[::2, half : 2 * half] = -x[::2, :half]
    return x, weight


@pytest.mark.parametrize("torch_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(17, 33), (192, 320), (320, 864), (64, 2100), (1000, 1024), (512, 2816)])
def test_linear_rows_do_not_depend_on_their_number_or_place(shape: tuple[int, int], torch_dtype: torch.dtype) -> None:
    if torch_dtype == torch.bfloat16 and cpu_panels.has_amx():
        pytest.skip("oneDNN's bf16 rows are not their own with AMX; panels take all bf16 weights here")
    if not cpu.supports(torch_dtype):
        pytest.skip("oneDNN packs no bf16 weights on this CPU")
    num_outputs, num_inputs = shape
    x, weight = cancelling(1100, num_outputs, num_inputs, torch_dtype)
    bias = torch.randn(num_outputs).to(torch_dtype)
    packed = cpu.pack(weight)
    min_rows = cpu.fewest_rows(num_outputs, num_inputs, torch_dtype)
    whole = cpu.linear(x, packed, bias)
    for count in (1, 2, 3, 5, 6, 8, 16, 31, 64, 257):
        last_start = min(len(x) - count, 40 * count)
        for start in range(0, last_start + 1, count):
            part = cpu.linear(x[start : start + count], packed, bias, min_rows=min_rows)
            assert torch.equal(part, whole[start : start + count]), f"{count} rows from {start}"
    assert cpu.linear(x[:0], packed, bias).shape == (0, num_outputs)
    assert cpu.linear(x[None, :3], packed, bias).shape == (1, 3, num_outputs)


@pytest.mark.parametrize("torch_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linears_match_the_reference(torch_dtype: torch.dtype, with_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(13, 130).to(torch_dtype), (torch.randn(65, 130) / 11).to(torch_dtype)
    bias = torch.randn(65).to(torch_dtype) if with_bias else None
    expected = reference.linear(x, weight, bias)
    # One unit in the last place of the largest outputs (about 4) in bf16; fp32 sums of 130 terms.
    tolerance = 2**-6 if torch_dtype == torch.bfloat16 else 5e-6
    for rows in (1, 5, 13):
        if cpu.supports(torch_dtype):
            ours = cpu.linear(x[:rows], cpu.pack(weight), bias)
            torch.testing.assert_close(ours, expected[:rows], atol=tolerance, rtol=0)
        fallback = padded_linear(x[:rows], weight, bias)
        torch.testing.assert_close(fallback, expected[:rows], atol=tolerance, rtol=0)


@pytest.mark.parametrize("torch_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["SiLU", "GELU", "Sigmoid", "Softplus"])
def test_activations_do_not_depend_on_the_shape(name: str, torch_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    arguments = {"approximate": "tanh"} if name == "GELU" else {}
    activation = RowInvariantActivation(getattr(torch.nn, name)(**arguments))
    x = (3 * torch.randn(1200, 100)).to(torch_dtype)
    single = torch.cat([activation(row[None]) for row in x])
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for count in (2, 7, 328, 329, 655, 1200):
                assert torch.equal(activation(x[:count]), single[:count]), (num_threads, count)
    finally:
        torch.set_num_threads(before)
    gate = torch.cat([x, x], dim=1)[:, :100]  # a strided half, as models with one gate-and-up matrix make it
    assert torch.equal(activation(gate[:7]), single[:7])
    assert apply_in_whole_vectors(torch.sigmoid, x[:0]).shape == (0, 100)


_ROW_COUNTS = """
import torch
from outrider.kernels.linear import cpu

def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

weight = torch.randn(320, 320).bfloat16()
packed, x = cpu.pack(weight), torch.randn(400, 320).bfloat16()
for count in (16, 64, 128):
    cpu.linear(x[:count], packed)
before = resident_mb()
for count in range(17, 400):
    cpu.linear(x[:count], packed)
print(resident_mb() - before)
"""


def test_memory_does_not_grow_with_the_number_of_row_counts() -> None:
    """In a process of its own; one oneDNN call for each of the 383 counts took 70 MB or more."""
    if not cpu.supports(torch.bfloat16):
        pytest.skip("oneDNN cannot prepack bf16 weights on this CPU")
    told = subprocess.run([sys.executable, "-c", _ROW_COUNTS], capture_output=True, text=True, check=True)
    assert float(told.stdout) < 25.0
