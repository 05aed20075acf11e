"""Speculation off and on against transformers' generate, plain and assisted: one request after another, greedy.

The target is the demo target expanded to 7.6 billion parameters (the same function at a large model's price), the draft
model the demo draft as it is. Ours: the verifier's engine and the draft methods in one process, their messages passed
as bytes, no network. Both sides bf16, both draft five tokens a round, the same prompts. Both stop after the same number
of tokens; what they say may differ where bf16 rounds otherwise, so agreement with transformers is noted, not asked for.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.gpu_report.llamas import EXPANDED, expanded, load_made
from benchmarks.gpu_report.report import Finding, Part, Run, judged, noted
from benchmarks.gpu_report.step import free_memory
from benchmarks.prompts import code_prompts
from models.make.expand import Shape
from outrider.drafting.methods.draft_model import DraftModelNet, draft_model_method
from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.ngram import NgramMethod
from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.certificate import certify
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from outrider.shared.messages import SessionSpec
from outrider.shared.sampling_params import SamplingParams
from outrider.verifier_service.engine import EngineLimits, VerifierEngine
from outrider.verifier_service.metrics import VerifierMetrics
from outrider.verifier_service.timing.step_costs import StepCosts
from tests.grid.driver import Driver, Session
from tests.grid.pools import BLOCK_SIZE, Pool

_MODELS = Path(__file__).parents[2] / "models"
TARGET, DRAFT = _MODELS / "demo-target", _MODELS / "demo-draft"
NUM_DRAFT_TOKENS = 5
_NUM_BLOCKS = 64
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Speed:
    """Outputs of the prompts in order; those of the first, which warms up, are not among them."""

    outputs: list[list[int]]
    seconds: float
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


def prompts_of(count: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in code_prompts(count)]


# ---- ours ----


def our_speeds(loaded: LoadedModel, draft: LoadedModel, prompts: Prompts, max_tokens: int) -> dict[str, Speed]:
    """Without drafts, with the draft model and with n-grams. Raises RuntimeError on a failed request."""
    runner = ModelRunner(loaded, loaded.make_cache(_NUM_BLOCKS, BLOCK_SIZE), graphs=True)
    registry = CollectorRegistry()
    engine = VerifierEngine(
        runner,
        BlockManager(_NUM_BLOCKS, BLOCK_SIZE),
        EngineLimits(4, 512, 256, loaded.max_model_len),
        certify(loaded, runner),
        VerifierMetrics(registry),
        StepCosts([(1, 0.005), (128, 0.02)]),
    )
    net = DraftModelNet(
        ModelRunner(draft, draft.make_cache(_NUM_BLOCKS, BLOCK_SIZE), graphs=True),
        BlockManager(_NUM_BLOCKS, BLOCK_SIZE),
        prefill_chunk_size=256,
    )
    methods: dict[str, DraftMethod | None] = {
        "off": None,
        "draft model": draft_model_method(net, DRAFT.name),
        "n-gram": NgramMethod(prompt_lookup_min=1, prompt_lookup_max=4),
    }
    engine.start()
    try:
        pool = Pool(engine, registry)
        return {name: _our_speed(pool, method, prompts, max_tokens) for name, method in methods.items()}
    finally:
        engine.stop()


def _our_speed(pool: Pool, method: DraftMethod | None, prompts: Prompts, max_tokens: int) -> Speed:
    sessions = [_session(prompt, method, max_tokens) for prompt in prompts]
    Driver(pool).run(sessions[:1])
    started = time.perf_counter()
    for session in sessions[1:]:
        Driver(pool).run([session])
    seconds = time.perf_counter() - started
    failures = [session.failure for session in sessions if session.failure]
    if failures:
        raise RuntimeError(failures[0])
    timed = sessions[1:]
    drafted, accepted = (
        sum(getattr(session, name) for session in timed) for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    return Speed([session.output for session in timed], seconds, drafted, accepted)


def _session(prompt: Sequence[int], method: DraftMethod | None, max_tokens: int) -> Session:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    name = f"{method.info.name if method else 'off'}-{hash(tuple(prompt))}"
    spec = SessionSpec(
        session_id=name,
        epoch=0,
        prompt_token_ids=tuple(prompt),
        committed_token_ids=(),
        sampling_params=params,
        mode=params.default_mode,
        stream_key=0,
        cache_salt=name,  # nobody finds another's prompt in the cache
    )
    return Session(spec, method, NUM_DRAFT_TOKENS, free_run=1 if method else max_tokens)


# ---- transformers' ----


def their_speeds(target: Any, draft: Any, prompts: Prompts, max_tokens: int) -> dict[str, Speed]:
    """Tokens a second of generate, plain, with the assistant model and with prompt lookup."""
    draft.generation_config.num_assistant_tokens = NUM_DRAFT_TOKENS
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    # transformers stops a draft early below this confidence; off, so that both sides draft five tokens.
    draft.generation_config.assistant_confidence_threshold = 0.0
    variants: Mapping[str, dict[str, Any]] = {
        "plain": {},
        "assistant model": {"assistant_model": draft},
        "prompt lookup": {"prompt_lookup_num_tokens": NUM_DRAFT_TOKENS},
    }
    return {
        name: _their_speed(lambda ids, options=options: _generate(target, ids, max_tokens, options), prompts)  # type: ignore[misc]
        for name, options in variants.items()
    }


def _their_speed(generate: Callable[[Sequence[int]], list[int]], prompts: Prompts) -> Speed:
    generate(prompts[0])
    started = time.perf_counter()
    outputs = [generate(prompt) for prompt in prompts[1:]]
    return Speed(outputs, time.perf_counter() - started)


@torch.inference_mode()
def _generate(target: Any, prompt: Sequence[int], max_tokens: int, options: dict[str, Any]) -> list[int]:
    token_ids = torch.tensor([list(prompt)], device=target.device)
    sequence = target.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    output: list[int] = sequence[0, len(prompt) :].tolist()
    return output


# ---- side by side ----


def compare(run: Run, shape: Shape, num_prompts: int, max_tokens: int) -> Iterable[Finding]:
    """Ours, then transformers', one model in memory at a time; the first prompt warms up."""
    transformers_logging.set_verbosity_error()  # it comments every call of generate
    transformers_logging.disable_progress_bar()
    prompts = prompts_of(num_prompts + 1)
    config, make = expanded(TARGET, shape)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_made(Path(folder), config, make, run.device)
        draft = load_model(str(DRAFT), dtype="bfloat16", device=run.device.type)
        ours = our_speeds(loaded, draft, prompts, max_tokens)
        yield from _our_findings(ours)
        del loaded, draft
        free_memory()
        target = make(folder, torch.bfloat16, run.device, "sdpa")
        assistant = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.bfloat16).to(run.device).eval()
        theirs = their_speeds(target, assistant, prompts, max_tokens)
    yield from _their_findings(theirs, ours["off"])
    del target, assistant
    free_memory()


def _our_findings(speeds: Mapping[str, Speed]) -> Iterable[Finding]:
    off = speeds["off"]
    for name, speed in speeds.items():
        shown = f"{speed.tokens_per_s:.0f} tokens/s"
        if name != "off":
            share = speed.accepted / max(1, speed.drafted)
            shown += f", {speed.tokens_per_s / off.tokens_per_s:.2f} x off, {share:.0%} of the drafts accepted"
        same = speed.outputs == off.outputs
        yield judged(f"speculation {name}", "output as without", shown, same, **_figures(speed))


def _their_findings(speeds: Mapping[str, Speed], ours: Speed) -> Iterable[Finding]:
    plain = speeds["plain"]
    for name, speed in speeds.items():
        shown = f"{speed.tokens_per_s:.0f} tokens/s"
        if name != "plain":
            shown += f", {speed.tokens_per_s / plain.tokens_per_s:.2f} x plain"
        num_same = sum(left == right for left, right in zip(speed.outputs, ours.outputs, strict=True))
        shown += f"; {num_same} of {len(ours.outputs)} outputs as ours"
        yield noted(f"transformers, {name}", shown, num_same=num_same, **_figures(speed))


def _figures(speed: Speed) -> dict[str, Any]:
    return {
        "tokens_per_s": speed.tokens_per_s,
        "seconds": speed.seconds,
        "num_draft_tokens": speed.drafted,
        "num_accepted_tokens": speed.accepted,
    }


def _measure(run: Run) -> Iterable[Finding]:
    return compare(run, EXPANDED, num_prompts=2 if run.quick else 4, max_tokens=96 if run.quick else 160)


PARTS = [Part("speculation", "demo target expanded to 7.6 B", 70.0, _measure)]
