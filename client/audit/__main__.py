"""The command `outrider audit`, and `outrider-audit` of the small wheel.

Exit codes: 0 no defect found, 1 broken, 2 wrong usage, 3 cannot audit (not reachable, no greedy answers, stopped
answering, or nothing could be tested), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NoReturn

from .answers import NoAnswerInTime
from .replay import BadReplayFile, read_replays, send_again
from .report import as_html, as_json, as_replay_lines, as_table
from .run import KINDS, CannotAudit, run_audit
from .session import Options
from .verdicts import Report
from .wire import DEFAULT_TIMEOUT_S, Server

QUICK_TOKENS, THOROUGH_TOKENS = 12_000, 60_000
INTERRUPTED = 130
_PROGRAM = "outrider-audit" if __package__ == "outrider_audit" else "outrider audit"
# fields that the tests set themselves: with other values they would say something untrue
_OUR_FIELDS = {"prompt", "messages", "n", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop"}
_OUR_FIELDS |= {"stream", "logprobs", "top_logprobs", "prompt_logprobs", "logit_bias", "presence_penalty"}
_OUR_FIELDS |= {"frequency_penalty", "min_tokens", "stop_token_ids", "tools", "tool_choice"}


def command() -> None:
    """The entry point of both commands."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)  # threads that still wait for answers would delay an exit


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    return _replay(given[1:]) if given[:1] == ["replay"] else _audit(given)


def _audit(arguments: Sequence[str]) -> int:
    chosen = audit_parser().parse_args(arguments)
    options = Options(
        model=chosen.model,
        tokens=chosen.budget or (THOROUGH_TOKENS if chosen.thorough else QUICK_TOKENS),
        seed=chosen.seed,
        body=chosen.body,
        reference_body=chosen.reference_body,
        only=chosen.tests,
        skip=frozenset(chosen.skip.split(",")) if chosen.skip else frozenset(),
    )
    with ExitStack() as stack:
        urls = [url for url in (chosen.url, chosen.reference) if url]
        servers = [stack.enter_context(closing(Server(url, chosen.key_env or "", chosen.timeout))) for url in urls]
        try:
            report = run_audit(
                servers[0],
                options,
                servers[1] if chosen.reference else None,
                lambda step: print(f"{step} ...", file=sys.stderr),
            )
        except CannotAudit as error:
            print(_printable(f"cannot audit {chosen.url}: {error}"), file=sys.stderr)
            return 3
    print(_printable(as_table(report)))
    texts = ((chosen.json, as_json), (chosen.html, as_html), (chosen.replay, as_replay_lines))
    try:
        for path, form in texts:
            if path is not None:
                path.write_text(form(report), encoding="utf-8")
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    return _exit_code(report, chosen.strict)


def _exit_code(report: Report, strict: bool) -> int:
    if report.is_broken or (strict and report.differs):
        return 1
    return 0 if report.is_complete else 3


def _replay(arguments: Sequence[str]) -> int:
    chosen = replay_parser().parse_args(arguments)
    try:
        with closing(Server(chosen.url, chosen.key_env or "", chosen.timeout)) as server:
            for replay in read_replays(chosen.file):
                print(_printable(send_again(server, replay)))
    except (BadReplayFile, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except NoAnswerInTime as error:
        print(error, file=sys.stderr)
        return 3
    return 0


def _printable(text: str) -> str:
    """The server's words without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    if taken := _OUR_FIELDS & value.keys():
        raise argparse.ArgumentTypeError(f"the tests set these themselves: {', '.join(sorted(taken))}")
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


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no file can be written there: {text}")
    return path


def _key(name: str) -> str:
    if not os.environ.get(name):
        raise argparse.ArgumentTypeError(f"the environment has no {name}")
    return os.environ[name]


class _OneLine(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, as the other commands do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.split()[0]}: {message}; `{self.prog} --help` lists what there is\n")


def _add_connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--key-env", type=_key, metavar="NAME", help="environment variable with the API key")
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=int(DEFAULT_TIMEOUT_S),
        metavar="SECONDS",
        help="for one whole answer; after it the audit stops (default: %(default)s)",
    )


def audit_parser() -> argparse.ArgumentParser:
    parser = _OneLine(
        _PROGRAM,
        description="Tests over HTTP whether a server's speculative decoding changes its output.",
        epilog=f"`{_PROGRAM} replay FILE --url URL` sends the requests that failed again. Exit codes: 0 no defect "
        "found, 1 broken, 2 wrong usage, 3 cannot audit, 130 interrupted.",
    )
    parser.add_argument("url", help="address of an OpenAI-compatible server")
    parser.add_argument("--model", default="", help="default: the first of /v1/models")
    parser.add_argument("--reference", default="", metavar="URL", help="the same model served without drafts")
    parser.add_argument("--body", type=_object, default={}, metavar="JSON", help="fields added to every request")
    parser.add_argument(
        "--reference-body", type=_object, metavar="JSON", help="fields that switch drafts off in a request"
    )
    parser.add_argument("--tests", type=_kinds, default=frozenset(), metavar="KINDS", help=f"some of {','.join(KINDS)}")
    parser.add_argument("--skip", default="", metavar="FIELDS", help="fields never to send, such as top_k,min_p")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help=f"{QUICK_TOKENS} sampled tokens (default)")
    size.add_argument("--thorough", action="store_true", help=f"{THOROUGH_TOKENS} sampled tokens, 250 tool calls")
    size.add_argument("--budget", type=_positive, metavar="TOKENS", help="tokens sampled in the tests of the law")
    parser.add_argument("--seed", type=int, default=1, help="of the audit's own choices (default: %(default)s)")
    _add_connection(parser)
    parser.add_argument("--strict", action="store_true", help="exit with 1 if greedy answers differ by rounding too")
    parser.add_argument("--json", type=_file, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--html", type=_file, metavar="FILE", help="write the report as a page")
    parser.add_argument("--replay", type=_file, metavar="FILE", help="write the requests that failed")
    return parser


def replay_parser() -> argparse.ArgumentParser:
    parser = _OneLine(f"{_PROGRAM} replay", description="Sends the requests of a replay file again.")
    parser.add_argument("file", type=Path, help="what `--replay FILE` has written")
    parser.add_argument("--url", required=True, help="address of the server")
    _add_connection(parser)
    return parser


if __name__ == "__main__":
    command()
