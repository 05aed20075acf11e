"""One request's life after its prompt: propose -> verify -> commit -> emit.

The loop knows interfaces only: in production both ends are gRPC streams, in tests and offline they run in-process.
It never waits for a drafter longer than `drafting` allows, and it emits nothing that is not in the commit log.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from outrider.gateway.proposals.drafting import Drafting
from outrider.gateway.request.commit_sink import CommitSink
from outrider.gateway.request.interfaces import Verifier
from outrider.shared.messages import SessionSpec


def _never() -> bool:
    return False


async def decode(
    spec: SessionSpec,
    verifier: Verifier,
    drafting: Drafting,
    sink: CommitSink,
    gives_way: Callable[[], bool] = _never,
) -> bool:
    """Runs the session to its end; False: it stopped after a commit as `gives_way` said, and can continue from `sink`.

    Raises VerifierLost (another verifier can continue from `sink`), CommitRefused (another gateway has taken over), or
    the error that the verifier ended the session with.
    """
    committed_len = len(spec.committed_token_ids)
    while True:
        answer = await drafting.propose(committed_len)
        step = drafting.step(answer, committed_len)
        started = time.perf_counter()
        async for commit in verifier.verify(step):
            verify_s = time.perf_counter() - started
            kept = await sink.put(drafting.signed(answer, commit))
            drafting.observe(answer, kept, verify_s)
            started = time.perf_counter()
            committed_len = kept.end
            if kept.finish_reason is not None:
                await sink.drain()
                return True
            if gives_way():
                return False
