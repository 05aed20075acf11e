"""The whole audit: abilities, then each kind of test, dangerous requests last."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata

from .abilities import drafts_seen, find_abilities
from .answers import NoAnswerInTime, ServerError
from .fields import check_fields, check_usage
from .greedy import ask_greedy, check_greedy, check_top_k_one
from .law import check_law, check_top_k_law
from .logprobs import check_logprobs
from .session import Options, Session
from .tools import check_tools
from .verdicts import Report, Verdict
from .wire import Server

# kind (--tests) and what it runs, in order
_TESTS: tuple[tuple[str, Callable[[Session], None]], ...] = (
    ("logprobs", check_logprobs),
    ("greedy", check_greedy),
    ("law", check_law),
    ("fields", check_fields),
    ("usage", check_usage),
    ("tools", check_tools),
    ("law", check_top_k_law),
    ("greedy", check_top_k_one),
)
KINDS = tuple(dict.fromkeys(kind for kind, _ in _TESTS))


class CannotAudit(Exception):
    """The server is not reachable, or gives no greedy answers."""


def run_audit(
    server: Server,
    options: Options,
    reference: Server | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Report:
    """Raises CannotAudit."""
    started = time.monotonic()
    session = Session(server, options, reference)
    try:
        progress("abilities")
        find_abilities(session)
        ask_greedy(session)
    except (ServerError, NoAnswerInTime) as error:
        raise CannotAudit(str(error)) from error
    stopped = _run_tests(session, progress)
    abilities = dataclasses.asdict(session.abilities)
    abilities["accepted"] = sorted(session.abilities.accepted)
    abilities["drafts_seen"] = drafts_seen(session)
    return Report(
        server=server.url,
        model=session.model,
        version=_version(),
        seed=options.seed,
        abilities=abilities,
        findings=tuple(session.findings),
        replays=tuple(session.replays),
        num_requests=server.num_requests,
        num_tokens=server.num_tokens,
        seconds=round(time.monotonic() - started, 1),
        stopped=stopped,
    )


def _run_tests(session: Session, progress: Callable[[str], None]) -> str:
    """Why it ended before the last test; empty: it did not."""
    for kind, test in _TESTS:
        if session.options.only and kind not in session.options.only:
            continue
        progress(kind)
        try:
            test(session)
        except ServerError as error:
            session.record_server_error(kind, error)
        except NoAnswerInTime as error:
            session.record(kind, Verdict.NOT_TESTED, f"{error}; --timeout allows more")
            return str(error)
        if not _is_alive(session.server):
            session.record(kind, Verdict.FAIL, "the server answers no more after these requests")
            return "the server answers no more"
    return ""


def _is_alive(server: Server) -> bool:
    try:
        server.get("/v1/models")
    except NoAnswerInTime:
        return False
    except ServerError as error:
        return error.status > 0
    return True


def _version() -> str:
    for distribution in ("outrider", "outrider-client", "outrider-audit"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return "0+unknown"
