"""A verify step of a Llama-8B of random weights at a context of 1,000: forward, tokens drawn from all rows, ids here.

Three sides on the same weights: exact mode as it is served (row-invariant kernels, shared noise, CUDA graph); the same
engine with cuBLAS in place of our linear and plain sampling, which is what exactness costs; and transformers' own model
(SDPA, keys and values in fixed places, CUDA graph, argmax). Wall time between two synchronisations.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.gpu_report.certificate import certificate_of
from benchmarks.gpu_report.correctness_sampling import random_keys
from benchmarks.gpu_report.llamas import LLAMA_8B, load_made, random_llama, streamed_bytes
from benchmarks.gpu_report.report import Finding, Part, Run, judged, noted
from benchmarks.gpu_report.stock_step import stock_step
from benchmarks.gpu_report.timing import Call, copy_bandwidth, wall_us
from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from outrider.kernels.coupled_sample.triton import coupled_sample
from outrider.kernels.linear import triton as our_linear
from outrider.kernels.sampling_support.transforms import Transforms

CONTEXT_LEN, BLOCK_SIZE = 1000, 16
ROW_COUNTS = (1, 8)
MOST_TIMES_STREAM = 1.25
MOST_OVERHEAD = 0.10
Draw = Callable[[torch.Tensor], torch.Tensor]


def tokens_of_step(num_rows: int, vocab_size: int) -> tuple[list[int], list[int]]:
    """The context's token ids, and those of the step's rows."""
    token_ids = [5 + position * 31 % (vocab_size - 5) for position in range(CONTEXT_LEN + num_rows)]
    return token_ids[:CONTEXT_LEN], token_ids[CONTEXT_LEN:]


def exact_draw(num_rows: int, device: torch.device) -> Draw:
    """Exact mode's: temperature 1, the shared noise."""
    laws, keys = Transforms.of_rows([(1.0, 0, 1.0, 0.0)] * num_rows, device), random_keys(num_rows, device)
    return lambda logits: coupled_sample(logits, laws, keys)


def plain_draw(logits: torch.Tensor) -> torch.Tensor:
    """The same law with the device's own noise: softmax, then the fastest of exponential clocks."""
    probs = torch.softmax(logits.float(), dim=-1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


def engine_step(loaded: LoadedModel, num_rows: int, draw: Draw) -> Call:
    """A step on a runner of its own, captured now: under the linear that is in force."""
    num_blocks = -(-(CONTEXT_LEN + num_rows) // BLOCK_SIZE)
    runner = ModelRunner(loaded, loaded.make_cache(num_blocks, BLOCK_SIZE), graphs=True)
    blocks = list(range(num_blocks))
    context, step = tokens_of_step(num_rows, loaded.vocab_size)
    runner.forward(build_batch([SessionRows(context, 0, blocks, 0)], BLOCK_SIZE))
    batch = build_batch([SessionRows(step, CONTEXT_LEN, blocks, num_rows)], BLOCK_SIZE)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        return draw(runner.forward(batch).logits).cpu()

    run()
    return run


@contextmanager
def cublas_linears() -> Iterator[None]:
    """Every row-invariant linear is F.linear meanwhile; what is captured stays so."""
    with patch.object(our_linear, "linear", torch.nn.functional.linear):
        yield


def _measure(run: Run) -> Iterable[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        yield from _engine_sides(Path(folder), run)
        free_memory()
        yield from _stock_side(Path(folder), run)
    free_memory()


def _engine_sides(folder: Path, run: Run) -> Iterable[Finding]:
    loaded = load_made(folder, LLAMA_8B, random_llama, run.device)
    yield certificate_of(loaded, "row invariance of this model", graphs=True)
    num_bytes = streamed_bytes(LLAMA_8B)
    stream_us = num_bytes / copy_bandwidth() * 1e6
    for num_rows in ROW_COUNTS:
        exact = engine_step(loaded, num_rows, exact_draw(num_rows, run.device))
        with cublas_linears():
            plain = engine_step(loaded, num_rows, plain_draw)
        times = wall_us({"exact": exact, "cublas": plain}, 15 if run.quick else 40)
        taken, overhead = times["exact"], times["exact"] / times["cublas"] - 1
        name = f"exact step, {num_rows} row{'s' if num_rows > 1 else ''}"
        measured = f"{taken / 1e3:.2f} ms, {taken / stream_us:.2f} x the {stream_us / 1e3:.2f} ms of its weights"
        yield judged(
            name, f"<= {MOST_TIMES_STREAM} x its weights' time", measured, taken <= MOST_TIMES_STREAM * stream_us,
            num_rows=num_rows, us=taken, stream_us=stream_us, streamed_bytes=num_bytes,
        )  # fmt: skip
        measured = f"{overhead:+.1%} of {times['cublas'] / 1e3:.2f} ms (cuBLAS, plain sampling)"
        name = f"what exactness costs, {num_rows} row{'s' if num_rows > 1 else ''}"
        yield judged(name, f"< {MOST_OVERHEAD:.0%}", measured, overhead < MOST_OVERHEAD, num_rows=num_rows, **times)


def _stock_side(folder: Path, run: Run) -> Iterable[Finding]:
    model = random_llama(str(folder), torch.bfloat16, run.device, "sdpa")
    for num_rows in ROW_COUNTS:
        step = stock_step(model, *tokens_of_step(num_rows, LLAMA_8B.vocab_size), run.device)
        taken = wall_us({"stock": step}, 15 if run.quick else 40)["stock"]
        name = f"transformers' step, {num_rows} row{'s' if num_rows > 1 else ''}"
        yield noted(name, f"{taken / 1e3:.2f} ms (SDPA, CUDA graph, argmax)", num_rows=num_rows, us=taken)


def free_memory() -> None:
    """Gives back what models and graphs that nobody holds any more have taken."""
    gc.collect()
    torch.cuda.empty_cache()


PARTS = [Part("step", "Llama-8B of random weights", 45.0, _measure)]
