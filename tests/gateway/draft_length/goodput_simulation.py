"""Sessions that draft in lock-step, in simulated time, and what the best fixed length would bring them.

The verifier's own BatchGathering and StepCosts run in it, as in its engine, so that the policy is told what it would be
told. Not simulated: sessions that take turns, noise of the clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.engine.attention.block_manager import BlockTable
from outrider.engine.sampling.laws import LogitsProcessor
from outrider.gateway.draft_length.draft_policy import DraftPolicy, RoundOutcome
from outrider.shared.messages import Proposal
from outrider.shared.sampling_params import SamplingParams
from outrider.verifier_service.scheduler import Work
from outrider.verifier_service.session import VerifierSession
from outrider.verifier_service.timing.gathering import BatchGathering
from outrider.verifier_service.timing.step_costs import StepCosts
from tests.verifier_service.engine_client import make_spec

FORWARD_S = 0.02
Table = tuple[tuple[int, float], ...]
TABLES: dict[str, Table] = {
    "rows for nothing": ((1, 1.0), (128, 1.1)),
    "cheap rows": ((1, 1.0), (8, 1.2), (128, 4.5)),
    "costly rows": ((1, 1.0), (128, 33.0)),
    "flat, then steep": ((1, 1.0), (16, 1.05), (128, 7.0)),
    "a staircase": ((1, 1.0), (16, 1.2), (17, 1.6), (32, 1.75), (33, 2.1), (48, 2.2), (49, 2.5), (128, 5.0)),
}


@dataclass(frozen=True)
class World:
    """Seconds are shares of FORWARD_S. `shown`: share of the tokens asked for that the drafter proposes at all."""

    table: str
    position_s: float
    overhead_s: float
    acceptance: float
    num_sessions: int
    shown: float = 1.0
    # How much longer a forward takes in a round with drafts than the verifier's table says: a drafter on its cores.
    contention: float = 0.0
    # Of the methods whose acceptance or position_s is another.
    acceptance_of: tuple[tuple[str, float], ...] = ()
    position_s_of: tuple[tuple[str, float], ...] = ()

    def forward_s(self, num_rows: int) -> float:
        return FORWARD_S * StepCosts(TABLES[self.table]).seconds(num_rows)

    def goodput(self, num_draft_tokens: int) -> float:
        """Tokens a second of all sessions at a fixed length: by its definition, nothing estimated."""
        survival = [self.acceptance ** (place + 1) for place in range(num_draft_tokens)]
        tokens = self.num_sessions * (1.0 + self.shown * sum(survival))
        return tokens / self.round_s(num_draft_tokens)

    def round_s(self, num_draft_tokens: int) -> float:
        seconds = self.forward_s(round(self.num_sessions * (1 + self.shown * num_draft_tokens)))
        if num_draft_tokens:
            seconds *= 1.0 + self.contention
            seconds += FORWARD_S * (self.overhead_s + num_draft_tokens * self.position_s)
        return seconds

    def best_goodput(self, max_draft_tokens: int) -> float:
        return max(self.goodput(length) for length in range(max_draft_tokens + 1))


@dataclass
class Run:
    """What has happened since the last `reset`."""

    num_tokens: int = 0
    seconds: float = 0.0
    lengths: list[int] = field(default_factory=list)
    rounds_s: list[float] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        return self.num_tokens / self.seconds


class LockStep:
    """`world` may be replaced between rounds."""

    def __init__(self, world: World, policies: Sequence[DraftPolicy], seed: int = 0) -> None:
        self.world = world
        self.policies = list(policies)
        self.now = 100.0
        self._random = random.Random(seed)
        self._free_left = [0] * len(policies)
        self._gathering = BatchGathering(StepCosts([(rows, FORWARD_S * cost) for rows, cost in TABLES[world.table]]))

    def run(self, num_tokens: int, until: Callable[[Run], bool] = lambda _run: False) -> Run:
        """Rounds until all sessions together have so many tokens, or `until` says so."""
        run = Run()
        while run.num_tokens < num_tokens and not until(run):
            self._round(run)
        return run

    def _ask(self, session: int) -> int:
        if self._free_left[session] > 0:
            return 0
        length = self.policies[session].num_draft_tokens()
        if length == 0:
            self._free_left[session] = self.policies[session].free_run()
        return length

    def _round(self, run: Run) -> None:
        world = self.world
        asked = [self._ask(session) for session in range(len(self.policies))]
        shown = [length if self._random.random() < world.shown else 0 for length in asked]
        accepted = [self._accepted(length, policy.method) for length, policy in zip(shown, self.policies, strict=True)]
        drafts_s = self._drafts_s(asked)
        overhead_s = FORWARD_S * world.overhead_s if any(asked) else 0.0
        plan = [WORKS[length] for length in shown]
        started = self.now + max(drafts_s.values(), default=0.0) + overhead_s
        slowed = 1.0 + world.contention if any(asked) else 1.0
        ended = started + slowed * world.forward_s(sum(work.num_rows for work in plan))
        rates = self._gathering.rates
        draft_rows_s = tuple(1e-6 * rows_us for rows_us in rates.draft_rows_us(len(plan)))
        tokens_per_s = rates.tokens_per_s(len(plan))
        last_round = self._gathering.last_round
        num_tokens = len(plan) + sum(accepted)
        self._gathering.observe(plan, num_tokens, started, ended)
        for session, policy in enumerate(self.policies):
            self._free_left[session] -= 1
            policy.observe(
                RoundOutcome(
                    num_asked=asked[session],
                    num_draft_tokens=shown[session],
                    num_accepted=accepted[session],
                    batch_sessions=len(plan),
                    draft_rows_s=draft_rows_s,
                    tokens_per_s=tokens_per_s,
                    draft_s=drafts_s[policy.method] if asked[session] else 0.0,
                    overhead_s=overhead_s,
                    method=policy.method if asked[session] else "",
                    round_tokens=last_round.num_tokens,
                    round_s=last_round.seconds,
                    open_sessions=len(plan),
                    verify_s=ended - started,
                )
            )
        run.num_tokens += num_tokens
        run.seconds += ended - self.now
        run.lengths += asked
        run.rounds_s.append(ended - self.now)
        self.now = ended

    def _drafts_s(self, asked: Sequence[int]) -> dict[str, float]:
        """Seconds by method, each of the longest draft that was asked of it."""
        drafts_s: dict[str, float] = {}
        for length, policy in zip(asked, self.policies, strict=True):
            if length:
                position_s = dict(self.world.position_s_of).get(policy.method, self.world.position_s)
                drafts_s[policy.method] = max(drafts_s.get(policy.method, 0.0), FORWARD_S * length * position_s)
        return drafts_s

    def _accepted(self, num_draft_tokens: int, method: str) -> int:
        acceptance = dict(self.world.acceptance_of).get(method, self.world.acceptance)
        hits = (self._random.random() < acceptance for _ in range(num_draft_tokens))
        return next((place for place, is_hit in enumerate(hits) if not is_hit), num_draft_tokens)


def _work(num_draft_tokens: int) -> Work:
    params = SamplingParams(temperature=0.0)
    session = VerifierSession(
        spec=make_spec([1], params),
        processor=LogitsProcessor(params, [1], ()),
        on_reply=lambda _reply: None,
        opened_at=0.0,
        token_ids=[1],
    )
    proposal = Proposal(0, (1,) * num_draft_tokens, "x") if num_draft_tokens else None
    return Work(session, BlockTable(), 1, proposal, 1 + num_draft_tokens)


WORKS = [_work(num_draft_tokens) for num_draft_tokens in range(17)]
