"""The tests marked `gpu`, then timings, on an NVIDIA GPU: `python -m benchmarks.gpu.report` ends with one table.

Exit code 2: no CUDA device; 1: a test failed. A target that is missed is a figure, no failure. Rows go to
benchmarks/results/gpu.jsonl. Needs torch, triton, transformers and pytest, no installation and none of the services'
libraries: a machine that was lent for its GPU has not all of ours. Times are medians (timing.py). The floor is the
bytes that a call must move at the measured bandwidth of a copy.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch
from xml.etree import ElementTree

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.gpu.timing import Call, copy_bandwidth, graph_us, num_copies, wall_us

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.jsonl"
ROW_COUNTS = (1, 8, 64)
# Weights of a Llama of 8 billion parameters, [N, K].
WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
# Kind of codes, group of inputs, whether there are minimums.
CODES = (("range", 128, False), ("range", 32, True), ("table", 16, False), ("i8", 32, False), ("e4m3", 128, False))
LAWS = {
    "temperature 1": (1.0, 0, 1.0, 0.0),
    "temperature 0.8, top-p 0.95": (0.8, 0, 0.95, 0.0),
    "temperature 0.8, top-k 50": (0.8, 50, 1.0, 0.0),
}
CONTEXT_LEN, BLOCK_SIZE = 1000, 16
# processes of pytest; each holds a CUDA context of half a GiB
_MOST_WORKERS = 15
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Finding:
    """One line of the table. verdict: "" where nothing is asked for; figures: for the JSON row alone."""

    section: str
    what: str
    measured: str
    target: str = ""
    verdict: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def timed(section: str, what: str, measured: str, target: str, *, met: bool, **figures: Any) -> Finding:
    """A finding with a target."""
    return Finding(section, what, measured, target, "met" if met else "missed", figures)


def main(
    tests: Annotated[str, typer.Option(help="pytest's -m; empty: no tests.")] = "gpu",
    timings: Annotated[bool, typer.Option(help="Whether anything is timed.")] = True,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/gpu.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.gpu.report --tests "gpu and not storm" --no-save"""
    if not torch.cuda.is_available():
        typer.echo("no CUDA device: this torch sees none. Without one the tests run in triton's interpreter.", err=True)
        raise typer.Exit(2)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    findings: list[Finding] = []
    sections = (time_linears, time_codes, time_attention, time_sampling, time_steps) if timings else ()
    for section in ((functools.partial(run_tests, tests),) if tests else ()) + sections:
        for finding in section():
            findings.append(finding)
            console.print(f"{finding.section}: {finding.what}: {finding.measured} {finding.verdict}", markup=False)
    if save:
        save_rows(RESULTS, findings, torch.cuda.get_device_name())
    console.print(table(findings, torch.cuda.get_device_name()))
    raise typer.Exit(any(finding.verdict == "FAILED" for finding in findings))


# ---- tests


def marked_files() -> list[Path]:
    """The files of tests that have the mark: others may import what is not installed here."""
    return sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())


def run_tests(expression: str) -> Iterator[Finding]:
    """A finding per file of the tests that the expression selects among the files that have the mark."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # No plugin of ours is taken for granted: the settings are gpu.ini's, not pyproject's.
        options = ["-c", "tests/gpu.ini", "--rootdir", ".", "-m", expression, f"--junit-xml={report}"]
        # A file that needs a library that is not there fails alone.
        options += ["--continue-on-collection-errors", "-p", "benchmarks.gpu.failures"]
        # Most of the time goes to compiling kernels, which a process does on one core.
        if importlib.util.find_spec("xdist"):
            options += ["-n", str(min(_MOST_WORKERS, len(os.sched_getaffinity(0)))), "--dist", "worksteal"]
        command = [sys.executable, "-m", "pytest", *options, *map(str, marked_files())]
        finished = subprocess.run(command, cwd=ROOT, check=False)
        if not report.is_file():
            yield Finding("tests", "pytest", f"ended with status {finished.returncode}", "", "FAILED")
            return
        yield from findings_of(report)


def findings_of(report: Path) -> Iterator[Finding]:
    """The findings of pytest's report in JUnit's XML."""
    outcomes: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kind = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        outcomes.setdefault(case.get("classname") or case.get("name") or "", Counter())[kind] += 1
    for name, counts in sorted(outcomes.items()):
        shown = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        failed = counts["failure"] + counts["error"] > 0
        yield Finding("tests", name, shown, "all pass", "FAILED" if failed else "met", dict(counts))


# ---- kernels


def time_linears() -> Iterator[Finding]:
    """The row-invariant linear beside cuBLAS."""
    from outrider.kernels.linear.triton import linear

    yield Finding("linear", "copy of 1 GiB", f"{copy_bandwidth() / 1e12:.2f} TB/s read and written")
    rows: list[dict[str, Any]] = []
    for shape in WEIGHTS:
        weights = [_normal(*shape) for _ in range(num_copies(2 * shape[0] * shape[1]))]
        for num_rows in ROW_COUNTS:
            x = _normal(num_rows, shape[1])
            ours, cublas = (
                graph_us([functools.partial(function, x, weight) for weight in weights])
                for function in (linear, torch.nn.functional.linear)
            )
            rows.append({"weight": shape, "rows": num_rows, "us": ours, "cublas_us": cublas, "ratio": ours / cublas})
    worst = max(rows, key=lambda row: float(row["ratio"]))
    shown = f"{worst['ratio']:.2f} x at worst ({worst['weight']}, {worst['rows']} rows)"
    shown += f", {statistics.median(row['ratio'] for row in rows):.2f} x median"
    target = "<= 1.1 x cuBLAS, 1-64 rows"
    yield timed("linear", "15 weights and row counts", shown, target, met=worst["ratio"] <= 1.1, cases=rows)


def time_codes() -> Iterator[Finding]:
    """The linear on packed codes beside ours on bfloat16 weights."""
    from outrider.kernels.linear import triton_code_blocks, triton_codes
    from outrider.kernels.linear.triton import linear
    from tests.kernels.test_code_panels import e4m3, integers, make_codes

    shape = (4096, 4096)
    plain = [_normal(*shape) for _ in range(num_copies(2 * shape[0] * shape[1]))]
    for kind, group, has_minimums in CODES:
        if kind == "e4m3":
            numbers = e4m3(*shape)
        elif kind == "table":  # 4 bits, spaced as E2M1's
            e2m1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12, 0], dtype=torch.int8)
            numbers = e2m1[integers(*shape, 0, 16).int()]
        else:
            numbers = integers(*shape, *((-8, 8) if kind == "range" else (-128, 128)))
        packed = triton_code_blocks.pack([make_codes(numbers, group, minimums=has_minimums)], "cuda")
        copies = [copy.deepcopy(packed) for _ in range(num_copies(packed.nbytes))]
        rows = []
        for num_rows in ROW_COUNTS:
            x = _normal(num_rows, shape[1])
            ours = graph_us([functools.partial(triton_codes.linear, x, weight) for weight in copies])
            bf16 = graph_us([functools.partial(linear, x, weight) for weight in plain])
            floor = (packed.nbytes + 2 * num_rows * sum(shape)) / copy_bandwidth() * 1e6
            rows.append({"rows": num_rows, "us": ours, "bf16_us": bf16, "floor_us": floor})
        shown = ", ".join(f"{row['us'] / row['bf16_us']:.2f} x bf16" for row in rows)
        name = f"{kind} in groups of {group}{' with minimums' if has_minimums else ''}"
        yield Finding("codes", name, f"{shown} at 1, 8, 64 rows of {shape}", figures={"cases": rows})


def time_attention() -> Iterator[Finding]:
    """Attention of a Llama-8B's heads over keys and values that no cache holds: 537 MB in scattered blocks."""
    from outrider.kernels.paged_attention.arguments import BatchTables, Scoring
    from outrider.kernels.paged_attention.triton import paged_attention

    num_sessions, length = 32, 4096
    tables = torch.randperm(num_sessions * length // BLOCK_SIZE, device="cuda").view(num_sessions, -1).int()
    keys, values = (_normal(tables.numel(), 8, BLOCK_SIZE, 128) for _ in range(2))
    floor = (keys.nbytes + values.nbytes) / copy_bandwidth() * 1e6
    for num_rows in (1, 8):
        total = num_sessions * num_rows
        batch = BatchTables(
            block_tables=tables,
            context_lens=_filled(num_sessions, length - num_rows),
            query_starts=torch.arange(0, total + 1, num_rows, dtype=torch.int32, device="cuda"),
            tree_starts=_filled(num_sessions, num_rows),
            parents=_filled(total, 0),
        )
        taken = graph_us(
            [functools.partial(paged_attention, _normal(total, 32, 128), keys, values, batch, Scoring(128**-0.5))]
        )
        shown = f"{taken:.0f} us, {taken / floor:.2f} x the floor of {floor:.0f} us"
        name, target = f"32 sessions x 4k, {num_rows} rows each", "<= 1.25 x its KV bytes' time"
        yield timed("attention", name, shown, target, met=taken <= 1.25 * floor, us=taken, floor_us=floor)


def time_sampling() -> Iterator[Finding]:
    """Exact mode's sampler on the device, and as the verifier calls it, launched one by one."""
    from outrider.kernels.coupled_sample.triton import coupled_sample
    from outrider.kernels.sampling_support.transforms import Transforms

    num_rows = 256
    for dtype, (name, law) in itertools.product((torch.bfloat16, torch.float32), LAWS.items()):
        first = (_normal(num_rows, 128256) * 3).to(dtype)
        laws, keys = Transforms.of_rows([law] * num_rows, torch.device("cuda")), _keys(num_rows)
        turns = [first.roll(turn, 0) for turn in range(num_copies(first.nbytes))]
        calls = [functools.partial(coupled_sample, logits, laws, keys) for logits in turns]
        taken, eager = graph_us(calls), wall_us({"eager": calls[0]}, 30)["eager"]
        shown = f"{taken:.0f} us ({eager:.0f} us launched one by one)"
        what = f"{str(dtype).removeprefix('torch.')}, {name}"
        yield timed("sampling", what, shown, "< 200 us, 256 rows x 128k", met=taken < 200, us=taken, eager_us=eager)


# ---- a verify step


def time_steps() -> Iterator[Finding]:
    """A verify step of a Llama-8B of random weights at a context of 1,000: forward, tokens of all rows, ids here. Exact
    mode as it is served, and the same engine with cuBLAS and plain sampling, which is what exactness costs.
    """
    from outrider.engine.model.load import load_model
    from outrider.kernels.coupled_sample.triton import coupled_sample
    from outrider.kernels.sampling_support.transforms import Transforms

    with tempfile.TemporaryDirectory() as folder:
        make_config(Path(folder))
        loaded = load_model(folder, device="cuda", make_model=random_llama)
    stream_us = streamed_bytes() / copy_bandwidth() * 1e6
    for num_rows in (1, 8):
        laws, keys = Transforms.of_rows([LAWS["temperature 1"]] * num_rows, torch.device("cuda")), _keys(num_rows)
        exact = engine_step(loaded, num_rows, functools.partial(coupled_sample, transforms=laws, key_words=keys))
        with cublas_linears():
            plain = engine_step(loaded, num_rows, plain_draw)
        times = wall_us({"exact": exact, "cublas": plain}, 40)
        floor = f"{times['exact'] / stream_us:.2f} x the {stream_us / 1e3:.2f} ms of its weights"
        shown = f"{times['exact'] / 1e3:.2f} ms, {floor}"
        met = times["exact"] <= 1.25 * stream_us
        yield timed("step", f"exact, {num_rows} rows", shown, "<= 1.25 x its weights' time", met=met, **times)
        cost = times["exact"] / times["cublas"] - 1
        shown = f"{cost:+.1%} of {times['cublas'] / 1e3:.2f} ms (cuBLAS, plain sampling)"
        yield timed("step", f"what exactness costs, {num_rows} rows", shown, "< 10 %", met=cost < 0.1)


def streamed_bytes() -> int:
    """Bytes of weights that a forward reads whole: all but the embedding, of which it reads rows."""
    width, head = LLAMA_8B["hidden_size"], LLAMA_8B["head_dim"]
    attention = width * head * 2 * (LLAMA_8B["num_attention_heads"] + LLAMA_8B["num_key_value_heads"])
    layer = attention + 3 * width * LLAMA_8B["intermediate_size"] + 2 * width
    num_bytes: int = 2 * (LLAMA_8B["num_hidden_layers"] * layer + width * (LLAMA_8B["vocab_size"] + 1))
    return num_bytes


def make_config(folder: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(**LLAMA_8B, tie_word_embeddings=False).save_pretrained(folder)


def random_llama(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Weights as transformers initialises them, drawn on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from outrider.engine.attention.layer import ATTENTION_NAME, register_attention

    register_attention()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path), dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    return model.eval().requires_grad_(False)


def plain_draw(logits: torch.Tensor) -> torch.Tensor:
    """Tokens by the device's own noise: softmax, then the fastest of exponential clocks."""
    probs = torch.softmax(logits.float(), dim=-1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


def engine_step(loaded: Any, num_rows: int, draw: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """A step on a runner of its own, captured now: under the linear that is in force."""
    from outrider.engine.attention.batch import SessionRows, build_batch
    from outrider.engine.run.runner import ModelRunner

    num_blocks = -(-(CONTEXT_LEN + num_rows) // BLOCK_SIZE)
    runner = ModelRunner(loaded, loaded.make_cache(num_blocks, BLOCK_SIZE), graphs=True)
    blocks, drawn = list(range(num_blocks)), loaded.vocab_size - 5
    token_ids = [5 + position * 31 % drawn for position in range(CONTEXT_LEN + num_rows)]
    runner.forward(build_batch([SessionRows(token_ids[:CONTEXT_LEN], 0, blocks, 0)], BLOCK_SIZE))
    batch = build_batch([SessionRows(token_ids[CONTEXT_LEN:], CONTEXT_LEN, blocks, num_rows)], BLOCK_SIZE)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        return draw(runner.forward(batch).logits).cpu()

    run()
    return run


@contextmanager
def cublas_linears() -> Iterator[None]:
    """Makes every row-invariant linear F.linear meanwhile; what is captured stays so."""
    from outrider.kernels.linear import triton

    with patch.object(triton, "linear", torch.nn.functional.linear):
        yield


# ---- inputs and output


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _filled(size: int, value: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.int32, device="cuda")


def _keys(num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**31), 2**31, (num_rows, 2), generator=generator).to(torch.int32).to("cuda")


def table(findings: Iterable[Finding], title: str) -> Table:
    made = Table(title=title)
    for column in ("section", "what", "target", "measured", "verdict"):
        made.add_column(column, overflow="fold")
    for finding in findings:
        cells = (finding.section, finding.what, finding.target, finding.measured, finding.verdict)
        made.add_row(*map(escape, cells), style="bold red" if finding.verdict == "FAILED" else "")
    return made


def save_rows(path: Path, findings: Iterable[Finding], device: str) -> None:
    """Appends a row per finding, with the device and the versions."""
    versions = {name: metadata.version(name) for name in ("torch", "triton", "transformers")}
    described = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "device": device, "versions": versions}
    with path.open("a") as out:
        for finding in findings:
            row = asdict(finding)
            out.write(json.dumps({**described, **row, **row.pop("figures")}) + "\n")


if __name__ == "__main__":
    typer.run(main)
