"""What predicted outputs bring: a file that is edited, with the file as prediction, a wrong one, or none.

`python -m benchmarks.predicted --base-url http://127.0.0.1:8000 --file shapes.py --rename area_of surface_of` asks a
running server to rename a function throughout a file, at temperature 0 and one stream, and prints tokens per second of
every setting over those without speculation. All texts must be the same. Rows of a setting are its fastest repetition.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import httpx

# seconds; one answer on a slow CPU
_TIMEOUT_S = 900.0
_WRONG = " ".join(
    f"The {thing} of the {owner} was seen near the old harbour."
    for thing in ("ship", "boat", "crew", "mast", "sail", "anchor", "deck")
    for owner in ("king", "queen", "town", "bridge", "tower", "lake", "hill", "river")
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--rename", nargs=2, required=True, metavar=("OLD", "NEW"))
    parser.add_argument("--methods", default="ngram", help="comma-separated")
    parser.add_argument("--lengths", default="16", help="draft tokens a round, comma-separated; 0: the server decides")
    parser.add_argument("--max-tokens", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=2)
    arguments = parser.parse_args()
    source = arguments.file.read_text(encoding="utf-8")
    old, new = arguments.rename
    question = (
        f"Rename `{old}` to `{new}` in this file, wherever it is used. Reply with the whole file in one code block, "
        f"nothing else.\n\n```python\n{source}```"
    )
    settings: list[tuple[str, dict[str, Any]]] = [("off", {"speculation": {"method": "off"}})]
    for method in arguments.methods.split(","):
        for length in map(int, arguments.lengths.split(",")):
            speculation = {"method": method} | ({"num_speculative_tokens": length} if length else {})
            for name, text in (("no prediction", None), ("the file", source), ("wrong", _WRONG)):
                prediction = {} if text is None else {"prediction": {"type": "content", "content": text}}
                settings.append((f"{method} {length or 'auto'}, {name}", {"speculation": speculation, **prediction}))
    with httpx.Client(base_url=arguments.base_url, timeout=_TIMEOUT_S) as client:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
        asked(client, {**body, "max_tokens": 2})  # the prompt is in the prefix cache from here on
        _print_all(client, {**body, "max_tokens": arguments.max_tokens}, settings, arguments.repeat)


def _print_all(
    client: httpx.Client, body: dict[str, Any], settings: list[tuple[str, dict[str, Any]]], repeat: int
) -> None:
    plain_rate, plain_text = 0.0, ""
    for name, fields in settings:
        runs = [asked(client, {**body, **fields}) for _ in range(repeat)]
        (text, usage), rate = runs[0][0], max(rate for _, rate in runs)
        plain_rate, plain_text = plain_rate or rate, plain_text or text
        if text != plain_text:
            raise SystemExit(f"{name}: another text than without speculation")
        details = usage.get("completion_tokens_details", {})
        accepted = details.get("accepted_prediction_tokens", "")
        rejected = details.get("rejected_prediction_tokens", "")
        print(
            f"{name:32} {usage['completion_tokens']:5} tokens  {rate:7.1f} tokens/s  {rate / plain_rate:5.2f} x"
            f"  accepted {accepted}  rejected {rejected}"
        )


def asked(client: httpx.Client, body: dict[str, Any]) -> tuple[tuple[str, dict[str, Any]], float]:
    """Text and usage, and output tokens per second, the short prefill included."""
    started = time.perf_counter()
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    took_s = time.perf_counter() - started
    usage = answer["usage"]
    return (answer["choices"][0]["message"]["content"], usage), usage["completion_tokens"] / took_s


if __name__ == "__main__":
    main()
