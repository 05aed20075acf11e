"""The whole audit: abilities, then each kind of test, dangerous requests last."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from .abilities import find_abilities, speculation_seen
from .fields import check_fields
from .greedy import ask_greedy, check_greedy, check_top_k_one
from .law import check_law, check_top_k_law
from .logprobs import check_logprobs
from .session import Options, Session
from .tools import check_tools
from .usage import check_usage
from .verdicts import Report
from .wire import Server, ServerError

VERSION = "0.1.0"
# kind (--only) and what it runs, in order
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
    except (ServerError, KeyError, IndexError, ValueError) as error:
        raise CannotAudit(str(error)) from error
    for kind, test in _TESTS:
        if options.only and kind not in options.only:
            continue
        progress(kind)
        try:
            test(session)
            server.get("/v1/models")
        except ServerError as error:
            session.record_server_error(f"alive: {kind}", error)
            if not _is_alive(server):
                break
    abilities = dataclasses.asdict(session.abilities)
    abilities["accepted"] = sorted(session.abilities.accepted)
    abilities["speculation_seen"] = session.abilities.speculation_seen or speculation_seen(server)
    return Report(
        server=server.url,
        model=session.model,
        version=VERSION,
        seed=options.seed,
        abilities=abilities,
        findings=tuple(session.findings),
        replays=tuple(session.replays),
        num_requests=server.num_requests,
        num_tokens=server.num_tokens,
        seconds=round(time.monotonic() - started, 1),
    )


def _is_alive(server: Server) -> bool:
    try:
        server.get("/v1/models")
    except ServerError:
        return False
    return True
