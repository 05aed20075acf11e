"""The report's books, its correctness section by triton's interpreter, and its models and steps at tiny sizes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from benchmarks.gpu_report import (
    correctness,
    correctness_sampling,
    draft,
    draft_head,
    llamas,
    rows,
    speculation,
    step,
    stock_step,
)
from benchmarks.gpu_report.__main__ import main
from benchmarks.gpu_report.report import Budget, Finding, Part, Run, is_sound, last_line, noted, run_parts, show
from models.make.expand import Shape, max_logit_difference
from outrider.kernels.linear import triton_codes
from outrider.shared.sampling_params import SpeculationMode

pytestmark = pytest.mark.storm

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = {part.name: part for part in correctness.PARTS}


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    """The models are tiny: a second thread waits for a core at every barrier."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_run(budget_s: float = 100.0) -> Run:
    return Run(DEVICE, Budget(budget_s), tiny=True, say=lambda _text: None)


def failing(_run: Run) -> Iterable[Finding]:
    yield noted("before", "found")
    raise ValueError("first line\nlast line")


def test_a_failure_and_a_spent_budget_stop_nothing() -> None:
    tracebacks: list[str] = []
    walk = KERNELS["rejection_sample"]
    parts = [
        Part("first", "fails", 0.0, failing),
        Part("second", "too long", 1000.0, walk.measure),
        walk,
    ]
    lines = run_parts(parts, tiny_run(), tracebacks.append)
    assert [(line.finding.name, line.finding.verdict) for line in lines] == [
        ("before", ""),
        ("fails", "FAILED"),
        ("too long", "skipped"),
        ("rejection_sample", "pass"),
    ]
    assert lines[1].finding.measured == "last line"
    assert "raise ValueError" in tracebacks[0]
    assert not is_sound(lines)
    assert is_sound(lines[2:])


def test_the_budget_is_what_is_left() -> None:
    now = [10.0]
    budget = Budget(5.0, clock=lambda: now[0])
    assert budget.left_s == 5.0
    now[0] = 17.0
    assert budget.left_s == -2.0


def test_the_last_line_of_an_error() -> None:
    assert last_line(KeyError("x")) == "KeyError: 'x'"
    assert len(last_line(ValueError("y" * 500))) == 160


def test_rows_and_table_hold_every_finding(tmp_path: Path) -> None:
    lines = run_parts(
        [Part("first", "fails", 0.0, failing), KERNELS["rejection_sample"]], tiny_run(), lambda _text: None
    )
    path = tmp_path / "results" / "gpu.jsonl"
    for _ in range(2):
        rows.save_rows(path, lines, rows.provenance(DEVICE, "abc"))
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["name"] for row in written] == ["before", "fails", "rejection_sample"] * 2
    assert {row["commit"] for row in written} == {"abc"}
    assert {row["versions"]["torch"] for row in written} == {torch.__version__}
    console = Console(width=140, file=io.StringIO())
    show(lines, "title", console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(word in text for word in ("title", "before", "FAILED", "every decision equal", "1 parts failed"))


def test_without_a_device_it_says_so_and_exits_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    app = typer.Typer()
    app.command()(main)
    outcome = CliRunner().invoke(app, [])
    assert outcome.exit_code == 2
    assert "no CUDA device" in outcome.output


def test_the_interpreted_section_passes_and_ends_with_the_table(tmp_path: Path) -> None:
    log, results = tmp_path / "log", tmp_path / "gpu.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu_report", "--interpret", "--log", log, "--results", results]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr + log.read_text()
    printed, last = outcome.stdout.rstrip().rsplit("\n", 1)
    assert last == "20 targets met, 0 missed, 0 parts failed, 0 skipped"
    live, table = printed.split("section", 1)
    for name in KERNELS:
        assert f"correctness: {name}" in live
        assert name in table
    assert not results.exists(), "figures of an interpreter are no results"


@pytest.mark.parametrize(
    ("part", "module", "kernel", "mutant"),
    [
        ("rotary", correctness, "rotate_", lambda *_arguments: None),
        ("gated_activation", correctness, "gated_activation", lambda gate, up, _name: gate * up),
        ("kv_write, kv_move", correctness, "kv_move", lambda *_arguments: None),
        ("coupled_sample", correctness_sampling, "coupled_sample", lambda logits, *_rest: logits.argmax(1)),
    ],
)
def test_a_wrong_kernel_misses_its_target(
    monkeypatch: pytest.MonkeyPatch, part: str, module: object, kernel: str, mutant: object
) -> None:
    monkeypatch.setattr(module, kernel, mutant)
    (line,) = run_parts([KERNELS[part]], tiny_run(), pytest.fail)
    assert line.finding.verdict == "MISS"


def test_rows_that_depend_on_their_number_miss_their_target(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = triton_codes.linear

    def linear(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return sound(x, *rest) if len(x) > 1 else torch.nextafter(sound(x, *rest), torch.tensor(torch.inf).bfloat16())

    monkeypatch.setattr(triton_codes, "linear", linear)
    lines = run_parts([KERNELS["packed codes"]], tiny_run(), pytest.fail)
    assert [line.finding.verdict for line in lines] == ["pass", "MISS"]


SMALL = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=300,
    max_position_embeddings=1100,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
    dtype="float32",
)


@pytest.mark.parametrize("has_laws", [False, True])
def test_both_sides_of_the_draft_draw_the_same_chains(tmp_path: Path, has_laws: bool) -> None:
    loaded = llamas.load_made(tmp_path, SMALL, llamas.random_llama, DEVICE)
    chains = draft.Chains(loaded, 2, graphs=False, has_laws=has_laws)
    expected = chains.by_host()
    for found in (chains.by_device(), chains.by_device()):
        assert [[drawn.token_id for drawn in chain] for chain in found] == expected
        assert {drawn.law is not None for chain in found for drawn in chain} == {has_laws}
    assert chains.by_host() == expected
    assert [len(chain) for chain in expected] == [draft.NUM_TOKENS] * 2
    assert expected[0] != expected[1]


@pytest.mark.parametrize("mode", list(SpeculationMode))
def test_both_sides_of_the_heads_draft_propose_the_same(mode: SpeculationMode) -> None:
    head = draft_head.random_head(SMALL, 100, DEVICE, torch.float32)
    chains = draft_head.HeadChains(head, 2, DEVICE, torch.float32, context_len=100)
    by_host, by_device = chains.side(mode, draws=False), chains.side(mode, draws=True)
    expected = by_host()
    for found in (by_device(), by_device()):
        assert [proposal.token_ids for proposal in found] == [proposal.token_ids for proposal in expected]
        assert [len(proposal.laws) for proposal in found] == [len(proposal.laws) for proposal in expected]
    assert by_host() == expected
    assert [len(proposal.token_ids) for proposal in expected] == [draft_head.NUM_TOKENS] * 2
    assert expected[0].token_ids != expected[1].token_ids


def test_the_stock_step_is_the_engines(tmp_path: Path) -> None:
    loaded = llamas.load_made(tmp_path, SMALL, llamas.random_llama, DEVICE)
    ours = step.engine_step(loaded, 4, lambda logits: logits.argmax(-1))
    model = llamas.random_llama(str(tmp_path), torch.float32, DEVICE, "sdpa")
    theirs = stock_step.stock_step(model, *step.tokens_of_step(4, SMALL.vocab_size), DEVICE)
    expected = ours()
    # Again and again: neither side's step may leave anything behind.
    for found in (ours(), theirs(), theirs()):
        assert torch.equal(found, expected)
    assert len(set(expected.tolist())) > 1
    streamed = sum(parameter.nbytes for parameter in model.parameters()) - model.model.embed_tokens.weight.nbytes
    assert llamas.streamed_bytes(SMALL, 4) == streamed


def test_speculation_beside_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = speculation.prompts_of
    monkeypatch.setattr(speculation, "prompts_of", lambda count: [prompt[:40] for prompt in whole(count)])
    findings = list(speculation.compare(tiny_run(), Shape(320, 6, 832, 5), num_prompts=1, max_tokens=16))
    assert [finding.verdict for finding in findings] == ["pass"] * 3 + [""] * 3
    ours, theirs = findings[:3], findings[3:]
    assert ours[0].figures["num_draft_tokens"] == 0
    assert all(0 < finding.figures["num_accepted_tokens"] for finding in ours[1:])
    # One function and one prompt, greedy: in bf16 the two may part where two tokens are nearly equal, here they do not.
    assert [finding.figures["num_same"] for finding in theirs] == [1, 1, 1]


def test_expanding_on_the_device_keeps_the_function(tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = LlamaForCausalLM(LlamaConfig(**(SMALL.to_dict() | {"tie_word_embeddings": True}))).eval()
    source.save_pretrained(tmp_path / "small")
    written = LlamaForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    config, make = llamas.expanded(tmp_path / "small", Shape(256, 3, 200, 16))
    config.save_pretrained(tmp_path / "large")
    large = make(str(tmp_path / "large"), torch.float32, torch.device("cpu"), "sdpa")
    assert max_logit_difference(written, large) < 1e-4
    assert sum(parameter.numel() for parameter in large.parameters()) > 4 * sum(p.numel() for p in written.parameters())
