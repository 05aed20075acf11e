"""Measures what predicted outputs bring: a file that is edited, with the file as prediction, wrong ones, or none.

`python -m benchmarks.predicted --base-url http://127.0.0.1:8000 --file shapes.py --rename area_of surface_of` asks a
running server to rename a function throughout a file, at temperature 0 and one stream, and prints one table. Settings
take turns, so that a change of the machine's speed meets all of them; a row is its setting's fastest repetition. The
wrong predictions are prose, and the file with its lines in reverse order. The exit code is 1 if a text differs from the
one without speculation.

What a wrong prediction costs shows on a verifier without draft methods, which `--model CHECKPOINT` starts in place of
`--base-url`: `suffix` remembers earlier answers, and `ngram` reads the prompt, which has the file here.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.screen import console
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.local_models import checkpoint_folder
from outrider.client.stack.processes import Stack

# seconds; one answer on a slow CPU
_TIMEOUT_S = 900.0
_PLAIN = "off"
_WRONG = " ".join(
    f"The {thing} of the {owner} was seen near the old harbour."
    for thing in ("ship", "boat", "crew", "mast", "sail", "anchor", "deck")
    for owner in ("king", "queen", "town", "bridge", "tower", "lake", "hill", "river")
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    server = parser.add_mutually_exclusive_group()
    server.add_argument("--base-url", default="http://127.0.0.1:8000")
    server.add_argument("--model", default="", help="serve this checkpoint, drafting from predictions alone")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--rename", nargs=2, required=True, metavar=("OLD", "NEW"))
    parser.add_argument(
        "--methods", default="auto", help="comma-separated; ngram without a prediction is added if it is served"
    )
    parser.add_argument("--lengths", default="0", help="draft tokens a round, comma-separated; 0: the server decides")
    parser.add_argument("--max-tokens", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=2)
    arguments = parser.parse_args()
    source = arguments.file.read_text(encoding="utf-8")
    old, new = arguments.rename
    question = (
        f"Rename `{old}` to `{new}` in this file, wherever it is used. Reply with the whole file in one code block, "
        f"nothing else.\n\n```python\n{source}```"
    )
    lengths = [int(length) for length in arguments.lengths.split(",")]
    with (
        _server(arguments.model, arguments.base_url) as url,
        httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client,
    ):
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
        asked(client, {**body, "max_tokens": 2})  # the prompt is in the prefix cache from here on
        body["max_tokens"] = arguments.max_tokens
        offered = client.get("/v1/models").raise_for_status().json()["data"][0]["draft_methods"]
        settings = _settings(source, arguments.methods.split(","), lengths, has_ngram="ngram" in offered)
        runs: dict[str, list[Run]] = {name: [] for name in settings}
        for _ in range(arguments.repeat):
            for name, fields in settings.items():
                runs[name].append(asked(client, {**body, **fields}))
    raise SystemExit(0 if _print_table(runs) else 1)


@contextmanager
def _server(model: str, base_url: str) -> Iterator[str]:
    """URL of a stack that serves `model` and drafts from predictions alone; without a model, `base_url`."""
    if not model:
        yield base_url
        return
    settings = StackSettings(
        model=checkpoint_folder(model, "--model", console.print),
        draft_model="",
        port=0,
        grpc_port=-1,
        num_drafters=0,
        drafter_args=("--local-methods", ""),
    )
    with (
        tempfile.TemporaryDirectory() as run_dir,
        Stack(settings, Path(run_dir), console.print, in_foreground=True) as state,
    ):
        yield state.url


def _settings(source: str, methods: list[str], lengths: list[int], *, has_ngram: bool) -> dict[str, dict[str, Any]]:
    """Maps each setting's name to its fields of the request; the first is plain decoding."""
    settings: dict[str, dict[str, Any]] = {_PLAIN: {"speculation": {"method": "off"}}}
    if has_ngram:
        settings["ngram, no prediction"] = {"speculation": {"method": "ngram"}}
    texts = {
        "no prediction": "",
        "the file": source,
        "wrong: prose": _WRONG,
        "wrong: lines reversed": "".join(reversed(source.splitlines(keepends=True))),
    }
    for method, length in itertools.product(methods, lengths):
        speculation = {"method": method} | ({"num_speculative_tokens": length} if length else {})
        for name, text in texts.items():
            prediction = {"prediction": {"type": "content", "content": text}} if text else {}
            label = f"{method} of {length}" if length else method
            settings[f"{label}, {name}"] = {"speculation": speculation, **prediction}
    return settings


def _print_table(runs: dict[str, list[Run]]) -> bool:
    """Returns whether all texts are the same."""
    plain_rate, plain_text = max(run.rate for run in runs[_PLAIN]), runs[_PLAIN][0].text
    print(
        f"{'':34} {'tokens':>6} {'tokens/s':>9} {'x plain':>8} {'a round':>8} {'accepted':>9} {'rejected':>9}"
        "  same bytes"
    )
    all_same = True
    for name, of_setting in runs.items():
        best = max(of_setting, key=lambda run: run.rate)
        is_same = all(run.text == plain_text for run in of_setting)
        all_same &= is_same
        print(
            f"{name:34} {best.num_tokens:6} {best.rate:9.1f} {best.rate / plain_rate:8.2f} {best.tokens_a_round:8.2f}"
            f" {best.accepted:>9} {best.rejected:>9}  {'yes' if is_same else 'NO'}"
        )
    return all_same


class Run(NamedTuple):
    """One answer. rate: output tokens per second, the prefix-cached prompt included. tokens_a_round: of rounds with a
    draft. accepted, rejected: tokens of the prediction; "" without one.
    """

    text: str
    num_tokens: int
    rate: float
    tokens_a_round: float
    accepted: str
    rejected: str


def asked(client: httpx.Client, body: dict[str, Any]) -> Run:
    started = time.perf_counter()
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    took_s = time.perf_counter() - started
    usage = answer["usage"]
    details = usage.get("completion_tokens_details", {})
    drafted = answer.get("metrics", {}).get("speculative_decoding", {})
    return Run(
        answer["choices"][0]["message"]["content"],
        usage["completion_tokens"],
        usage["completion_tokens"] / took_s,
        drafted.get("mean_acceptance_length", 1.0),
        str(details.get("accepted_prediction_tokens", "")),
        str(details.get("rejected_prediction_tokens", "")),
    )


if __name__ == "__main__":
    main()
