"""Variants of one running stack in turn, one stream of code prompts each: figures are medians over rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from rich.progress import Progress
from rich.table import Table

from benchmarks.load import LoadResult, Shape, run_load
from benchmarks.prompts import code_prompts
from benchmarks.records import quantiles
from benchmarks.screen import console, table
from outrider.client.stack.processes import Stack

_NUM_PROMPTS = 4
# tokens of a request in the first round, which warms up and is not counted
_WARM_UP_TOKENS = 16


Figures = dict[float, dict[str, dict[str, Any]]]


def measure(
    stack: Stack,
    variants: Mapping[str, Mapping[str, Any]],
    temperatures: Iterable[float],
    *,
    max_tokens: int,
    rounds: int,
) -> Figures:
    """Figures by temperature and variant, which is the rest of a load's shape. Starts and stops the stack; shows a
    table."""
    with stack as state:
        figures = {
            temperature: _measure(state.url, variants, temperature, max_tokens, rounds) for temperature in temperatures
        }
    console.print(_table(figures))
    return figures


def _measure(
    url: str, variants: Mapping[str, Mapping[str, Any]], temperature: float, max_tokens: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Sampling has a seed: exact mode."""
    prompts, seed = code_prompts(_NUM_PROMPTS), 7 if temperature else None
    results: dict[str, list[LoadResult]] = {name: [] for name in variants}
    with Progress(console=console) as progress:
        task = progress.add_task(f"temperature {temperature:g}", total=(rounds + 1) * len(variants))
        for round_index in range(rounds + 1):
            for name, wanted in variants.items():
                num_tokens = max_tokens if round_index else _WARM_UP_TOKENS
                shape = Shape(num_tokens, temperature=temperature, seed=seed, **wanted)
                result = asyncio.run(run_load(url, prompts, shape, 1))
                if round_index:
                    results[name].append(result)
                progress.advance(task)
    return {name: _figures(found) for name, found in results.items()}


def _figures(results: list[LoadResult]) -> dict[str, Any]:
    requests = [request for result in results for request in result.requests]
    return {
        "tokens_per_s": median(result.tokens_per_s for result in results),
        "tokens_per_s_quantiles": quantiles([result.tokens_per_s for result in results]),
        "mean_acceptance_length": median(request.mean_acceptance_length for request in requests),
        "num_outputs_seen": len({tuple(request.token_ids) for request in requests}),
    }


def _table(figures: Figures) -> Table:
    """A row for each variant of each temperature; `off` is what the others are compared with."""
    shown = table("variant", "temperature", "tokens/s", "of off", "accept len", f"outputs of {_NUM_PROMPTS} prompts")
    for temperature, rows in figures.items():
        for name, row in rows.items():
            shown.add_row(
                name,
                f"{temperature:g}",
                f"{row['tokens_per_s']:.1f}",
                f"{row['tokens_per_s'] / rows['off']['tokens_per_s']:.2f}",
                f"{row['mean_acceptance_length']:.2f}",
                str(row["num_outputs_seen"]),
            )
    return shown
