"""Measures mean acceptance lengths through a running gateway: by method, draft length, temperature and domain.

Figures come from the per-request speculation metrics of real requests on held-out prompts, so they cover the whole
path: drafter, wire, verifier. Not a benchmark: nothing is timed. Not here: estimates without a server.
Run: `outrider train evaluate --help`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from outrider.training.data.completion_client import CompletionClient, CompletionRequest, FatalServerError, for_each
from outrider.training.data.domains import domain_prompts
from outrider.training.data.prepare_data import first_model
from outrider.training.data.prompts import Prompt
from outrider.training.errors import SettingError
from outrider.training.progress import Progress


@dataclass(frozen=True)
class EvaluateConfig:
    """The requests to make. Above temperature 0 they have no seed, so the gateway defaults to rejection mode."""

    base_url: str
    model: str = ""
    api_key: str = ""
    methods: tuple[str, ...] = ("draft_model", "ngram")
    draft_lens: tuple[int, ...] = (1, 3, 5)
    tree_nodes: tuple[int, ...] = ()  # sizes of token trees, in addition to chains
    temperatures: tuple[float, ...] = (0.0, 1.0)
    domains: tuple[str, ...] = ("code", "prose", "chat")
    num_prompts: int = 16
    max_tokens: int = 128
    concurrency: int = 4
    seed: int = 0
    corpus: Path = Path(".run/training")
    timeout_s: float = 300.0

    def check(self) -> None:
        """Raises SettingError that names the option."""
        for name in ("draft_lens", "tree_nodes", "num_prompts", "max_tokens", "concurrency"):
            values = getattr(self, name)
            if min(values if isinstance(values, tuple) else (values,), default=1) < 1:
                raise SettingError(f"--{name.rstrip('s').replace('_', '-')} must be at least 1, not {values}")


@dataclass(frozen=True)
class Cell:
    """One combination, summed over its requests.

    acceptance_histogram[i]: steps with exactly i accepted draft tokens. draft_len: the number of nodes if `token_tree`;
    n-gram and suffix have only chains.
    """

    method: str
    draft_len: int
    token_tree: bool
    temperature: float
    domain: str
    num_requests: int
    num_tokens: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_histogram: tuple[int, ...]

    @property
    def mean_acceptance_length(self) -> float:
        """Returns the tokens per step with a draft, the target's own included; 0 without such steps."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Returns the share of those steps with at least i+1 accepted draft tokens."""
        reached = [sum(self.acceptance_histogram[i:]) for i in range(1, len(self.acceptance_histogram))]
        return tuple(round(count / self.num_spec_steps, 4) for count in reached) if self.num_spec_steps else ()


@dataclass(frozen=True)
class Figures:
    """All cells, and the settings of the measurement."""

    settings: dict[str, Any]
    cells: tuple[Cell, ...]

    def as_dict(self) -> dict[str, Any]:
        rows = [
            asdict(cell)
            | {
                "mean_acceptance_length": round(cell.mean_acceptance_length, 4),
                "acceptance_by_position": cell.acceptance_by_position,
            }
            for cell in self.cells
        ]
        return {"settings": self.settings, "cells": rows}

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")


async def evaluate_through_gateway(config: EvaluateConfig, progress: Progress) -> Figures:
    """Runs all requests. Raises SettingError, PromptError, and ServerError that quotes a refusing gateway."""
    config.check()
    domains = dict(domain_prompts(domain, config.corpus, config.num_prompts, config.seed) for domain in config.domains)
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    base_url = config.base_url.rstrip("/") + "/"
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=config.timeout_s) as http:
        client = CompletionClient(http, config.model or await first_model(http))
        shapes = [(length, False) for length in config.draft_lens] + [(nodes, True) for nodes in config.tree_nodes]
        combinations = list(product(config.methods, shapes, config.temperatures, domains))
        progress.start(sum(len(domains[domain]) for *_, domain in combinations))
        cells = []
        try:
            for method, shape, temperature, domain in combinations:
                requests = [
                    _request(prompt, method, shape, temperature, config.max_tokens) for prompt in domains[domain]
                ]
                answers = await _ask_all(client, requests, config.concurrency, progress)
                cells.append(_cell(method, shape, temperature, domain, answers))
        finally:
            progress.stop()
    settings = {
        "model": client.model,
        "num_prompts": {domain: len(prompts) for domain, prompts in domains.items()},
        "max_tokens": config.max_tokens,
    }
    return Figures(settings, tuple(cells))


def _request(
    prompt: Prompt, method: str, shape: tuple[int, bool], temperature: float, max_tokens: int
) -> CompletionRequest:
    speculation = {"method": method, "num_speculative_tokens": shape[0], "token_tree": shape[1]}
    return CompletionRequest(prompt, temperature, None, max_tokens, {"speculation": speculation})


async def _ask_all(
    client: CompletionClient, requests: Sequence[CompletionRequest], concurrency: int, progress: Progress
) -> list[Mapping[str, Any]]:
    answers: list[Mapping[str, Any]] = []

    async def ask(request: CompletionRequest) -> None:
        answers.append(await client.complete(request))
        progress.advance(str(request.extra["speculation"]["method"]))

    await for_each(requests, ask, concurrency)
    return answers


def _cell(
    method: str, shape: tuple[int, bool], temperature: float, domain: str, answers: list[Mapping[str, Any]]
) -> Cell:
    metrics = [_speculation_of(answer) for answer in answers]
    histograms = [figures["acceptance_histogram"] for figures in metrics]
    return Cell(
        method=method,
        draft_len=shape[0],
        token_tree=shape[1],
        temperature=temperature,
        domain=domain,
        num_requests=len(answers),
        num_tokens=sum(len(answer["token_ids"] or ()) for answer in answers),
        num_spec_steps=sum(figures["num_spec_steps"] for figures in metrics),
        num_draft_tokens=sum(figures["num_draft_tokens"] for figures in metrics),
        num_accepted_draft_tokens=sum(figures["num_accepted_draft_tokens"] for figures in metrics),
        acceptance_histogram=tuple(sum(column) for column in zip_longest(*histograms, fillvalue=0)),
    )


def _speculation_of(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        figures: Mapping[str, Any] = answer["metrics"]["speculative_decoding"]
    except (KeyError, TypeError):
        raise FatalServerError(
            "the answer has no metrics.speculative_decoding: not an Outrider gateway, or one started with "
            "--per-request-spec-decode-metrics none"
        ) from None
    return figures


def show(figures: Figures, console: Console) -> None:
    """Prints acceptance lengths: one row per method, temperature and domain, one column per draft length or tree."""
    shapes = sorted({(cell.token_tree, cell.draft_len) for cell in figures.cells})
    names = (f"tree of {length}" if is_tree else f"k={length}" for is_tree, length in shapes)
    table = Table("method", "temperature", "domain", *names)
    table.title = "tokens per step of the target (draft tokens accepted + 1)"
    keys = dict.fromkeys((cell.method, cell.temperature, cell.domain) for cell in figures.cells)
    by_key = {
        (cell.method, cell.temperature, cell.domain, (cell.token_tree, cell.draft_len)): cell for cell in figures.cells
    }
    for method, temperature, domain in keys:
        values = [f"{by_key[method, temperature, domain, shape].mean_acceptance_length:.2f}" for shape in shapes]
        table.add_row(method, f"{temperature:g}", domain, *values)
    console.print(table)
