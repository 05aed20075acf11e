"""The command `outrider audit`, and `outrider-audit` of the small wheel.

Exit codes: 0 no defect found, 1 broken, 2 wrong usage, 3 cannot audit (not reachable, or no greedy answers).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .replay import BadReplayFile, read_replays, send_again
from .report import as_html, as_json, as_replay_lines, as_table
from .run import KINDS, CannotAudit, run_audit
from .session import Options
from .wire import Server

QUICK_TOKENS, THOROUGH_TOKENS = 12_000, 60_000


def command() -> None:
    """The entry point of the small wheel."""
    sys.exit(main())


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["replay"]:
            return _replay(given[1:])
        return _audit(given)
    except KeyboardInterrupt:
        return 130


def _audit(arguments: Sequence[str]) -> int:
    chosen = _parser().parse_args(arguments)
    options = Options(
        model=chosen.model,
        tokens=chosen.budget or (THOROUGH_TOKENS if chosen.thorough else QUICK_TOKENS),
        seed=chosen.seed,
        body=chosen.body,
        reference_body=chosen.reference_body,
        only=chosen.tests,
        skip=frozenset(chosen.skip.split(",")) if chosen.skip else frozenset(),
    )
    key = os.environ.get(chosen.key_env, "") if chosen.key_env else ""
    reference = Server(chosen.reference, key) if chosen.reference else None
    try:
        report = run_audit(Server(chosen.url, key), options, reference, lambda step: print(step, file=sys.stderr))
    except CannotAudit as error:
        print(f"cannot audit {chosen.url}: {error}", file=sys.stderr)
        return 3
    print(as_table(report))
    for path, text in (
        (chosen.json, as_json(report)),
        (chosen.html, as_html(report)),
        (chosen.replay, as_replay_lines(report.replays)),
    ):
        if path is not None:
            path.write_text(text, encoding="utf-8")
    return 1 if report.is_broken or (chosen.strict and report.differs) else 0


def _replay(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("outrider audit replay", description="Sends the requests of a replay file again.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--key-env", default="")
    chosen = parser.parse_args(arguments)
    server = Server(chosen.url, os.environ.get(chosen.key_env, "") if chosen.key_env else "")
    try:
        for replay in read_replays(chosen.file):
            print(send_again(server, replay))
    except (BadReplayFile, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def _kinds(text: str) -> frozenset[str]:
    wanted = frozenset(text.split(","))
    if unknown := wanted - set(KINDS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(KINDS)}")
    return wanted


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("not a positive number")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "outrider audit",
        description="Tests over HTTP whether a server's speculative decoding changes its output.",
        epilog="`outrider audit replay FILE --url URL` sends the requests that failed again. Exit codes: 0 no defect "
        "found, 1 broken, 2 wrong usage, 3 cannot audit.",
    )
    parser.add_argument("url", help="address of an OpenAI-compatible server")
    parser.add_argument("--model", default="", help="default: the first of /v1/models")
    parser.add_argument("--reference", default="", help="address of the same model served without drafts")
    parser.add_argument("--body", type=_object, default={}, help="JSON object added to every request")
    parser.add_argument("--reference-body", type=_object, help="JSON object that turns drafts off in a request")
    parser.add_argument("--tests", type=_kinds, default=frozenset(), help=f"some of {','.join(KINDS)}")
    parser.add_argument("--skip", default="", help="fields never to send, such as top_k,min_p")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help=f"{QUICK_TOKENS} sampled tokens (default)")
    size.add_argument("--thorough", action="store_true", help=f"{THOROUGH_TOKENS} sampled tokens, 250 tool calls")
    size.add_argument("--budget", type=_positive, help="tokens sampled in the tests of the law")
    parser.add_argument("--seed", type=int, default=1, help="of the audit's own choices")
    parser.add_argument("--key-env", default="", help="variable of the environment with the API key")
    parser.add_argument("--strict", action="store_true", help="greedy answers that differ by rounding exit with 1 too")
    parser.add_argument("--json", type=Path, help="write the report as JSON")
    parser.add_argument("--html", type=Path, help="write the report as a page")
    parser.add_argument("--replay", type=Path, help="write the requests that failed, one replay per line")
    return parser


if __name__ == "__main__":
    command()
