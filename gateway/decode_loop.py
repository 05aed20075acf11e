"""One request's life after its prompt: propose -> verify -> commit -> emit.

The loop knows interfaces only: in production both ends are gRPC streams, in tests and offline they run in-process.
It never waits for a drafter longer than `drafting` allows, and it emits nothing that is not in the commit log.
"""

from __future__ import annotations

from gateway.commit_sink import CommitSink
from gateway.drafting import Drafting
from gateway.interfaces import Verifier
from shared.messages import SessionSpec, VerifyStep


async def decode(spec: SessionSpec, verifier: Verifier, drafting: Drafting, sink: CommitSink) -> None:
    """Runs the session to its end, or raises: VerifierLost (another verifier can go on from `sink`), CommitRefused
    (another gateway has taken over), or the error that the verifier ended the session with.
    """
    committed_len = len(spec.committed_token_ids)
    while True:
        proposal = await drafting.propose(committed_len)
        step = VerifyStep(
            epoch=spec.epoch,
            base_len=committed_len,
            proposal=proposal,
            max_new_tokens=0 if proposal is not None else drafting.free_run_budget(),
            hidden_states=drafting.hidden_states_request(committed_len),
            local_drafts=drafting.local_drafts,
        )
        started = drafting.clock()
        async for commit in verifier.verify(step):
            verify_s = drafting.clock() - started
            kept = await sink.put(drafting.signed(step, commit))
            drafting.observe(step, kept, verify_s)
            if commit.more and (steer := drafting.steering()) is not None:
                await verifier.steer(steer)
            started = drafting.clock()
            committed_len = kept.end
            if kept.finish_reason is not None:
                await sink.drain()
                return
