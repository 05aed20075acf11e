"""Runs validated requests: picks a verifier and a drafter per choice, decodes, moves the session when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from outrider.gateway.admission.fair_starts import MAX_PARALLEL_CHOICES, FairStarts, Place, Room
from outrider.gateway.admission.grammar_turns import GrammarTurns
from outrider.gateway.config import GatewayConfig
from outrider.gateway.decoding.decode_loop import decode
from outrider.gateway.fleet.drafter_choice import acquire_drafter, drafter_offers
from outrider.gateway.fleet.placement import VerifierKinds, acquire_verifier, kind_for
from outrider.gateway.fleet.pool import Pool
from outrider.gateway.fleet.remote import RemoteVerifier
from outrider.gateway.metrics import GatewayMetrics, RequestTimes
from outrider.gateway.proposals.ask import DraftHint, DraftPlan, LocalMethods
from outrider.gateway.proposals.drafter_connection import Lease
from outrider.gateway.proposals.drafting import Drafting
from outrider.gateway.request.commit_sink import CommitSink, SpeculationTally
from outrider.gateway.request.detokenizer import IncrementalDetokenizer
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import METHOD_AUTO, METHOD_OFF, ChoiceStart, GenerationUpdate, ValidRequest
from outrider.shared.errors import Overloaded, TargetReplaced, VerifierLost
from outrider.shared.messages import DrafterInfo, DrafterOffer, SessionSpec, VerifierInfo, weights_of
from outrider.shared.request_params import MAX_SPECULATIVE_TOKENS
from outrider.shared.sampling_params import SpeculationMode
from outrider.shared.speculative_config import SpeculativeConfig

# A session that kills verifier after verifier before its next token must not go round for ever.
MAX_FRUITLESS_FAILOVERS = 4
# seconds; before a full verifier is asked again
OVERLOADED_WAIT_S = 0.05
# outputs; of one gateway that ask again at a time, in turn: the others would each send their prompt 20 times a second
MAX_ASKING_AGAIN = 2


@dataclass
class Generation:
    """The parts of the gateway that choices are generated with."""

    config: GatewayConfig
    speculative: SpeculativeConfig
    tokenizer: Tokenizer
    verifiers: Pool[VerifierInfo]
    drafters: Pool[DrafterInfo]
    metrics: GatewayMetrics
    kinds: VerifierKinds = dataclasses.field(init=False)
    grammar_turns: GrammarTurns = dataclasses.field(default_factory=GrammarTurns)
    starts: FairStarts = dataclasses.field(init=False)
    _asking_again: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(MAX_ASKING_AGAIN))
    # Keys are verifiers' addresses.
    _hints: dict[str, DraftHint] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kinds = VerifierKinds(self.verifiers, self.config.numerics)
        self.starts = FairStarts(Room(self.verifiers))

    async def generate(self, request: ValidRequest) -> AsyncGenerator[GenerationUpdate, None]:
        """Yields updates of the choices in `request.starts` as they come; closing the generator frees every session."""
        updates: asyncio.Queue[GenerationUpdate | Exception] = asyncio.Queue(self.config.max_queued_commits)
        times = RequestTimes(self.metrics, request)
        room = asyncio.Semaphore(MAX_PARALLEL_CHOICES)
        turn = await self.grammar_turns.take(request.owner, request.sampling_params.grammar)
        choices = [self._run_choice(request, start, updates, room, times) for start in request.starts]
        tasks = [asyncio.create_task(choice) for choice in choices]
        num_finished = 0
        try:
            while num_finished < len(tasks):
                update = await updates.get()
                if isinstance(update, Exception):
                    raise update
                turn.end(decoded=True)
                if not update.replayed:
                    times.add(update)
                if request.trace is not None:
                    request.trace.observe(update)
                num_finished += update.finish_reason is not None
                yield update
        finally:
            for task in tasks:
                task.cancel()
            turn.end(decoded=False)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_choice(
        self,
        request: ValidRequest,
        start: ChoiceStart,
        updates: asyncio.Queue[GenerationUpdate | Exception],
        room: asyncio.Semaphore,
        times: RequestTimes,
    ) -> None:
        caller = request.caller or request.owner
        async with room:
            place = await self.starts.take(caller) if start.is_new else self.starts.take_now(caller)
            try:
                await self._decode_choice(request, start, updates, place, times)
            finally:
                place.free()

    async def _decode_choice(
        self,
        request: ValidRequest,
        start: ChoiceStart,
        updates: asyncio.Queue[GenerationUpdate | Exception],
        place: Place,
        times: RequestTimes,
    ) -> None:
        sink = CommitSink(
            start,
            detokenizer=self._detokenizer(request),
            tally=SpeculationTally(self._num_speculative_tokens(request)),
            updates=updates,
            max_queued_commits=self.config.max_queued_commits,
            on_logged=place.opened,
        )
        self.metrics.running.inc()
        try:
            if await sink.replay():
                await sink.drain()
            else:
                times.start(start.choice_index)
                await self._decode_with_failover(request, self._spec(request, start, sink), sink, place)
        except Exception as error:
            self.metrics.observe_failure(error)
            if request.trace is not None:
                request.trace.fail(error)
            with contextlib.suppress(Exception):  # what is in the log is still emitted; the first error is reported
                await sink.drain()
            await updates.put(error)
        finally:
            self.metrics.running.dec()
            await sink.close()

    async def _decode_with_failover(
        self, request: ValidRequest, spec: SessionSpec, sink: CommitSink, place: Place
    ) -> None:
        """A lost verifier costs time, not tokens, and so does a place that is given to others for a while: the next
        epoch continues after what was committed.
        """
        acquire = functools.partial(self._lease_drafter, request)
        num_fruitless = 0
        overloaded_until = time.monotonic() + self.config.failover_s
        lost: VerifierLost | None = None
        full: set[str] = set()
        while True:
            is_refused = False
            # In rejection mode other arithmetic will do, other weights will not.
            numerics = spec.numerics if spec.mode is SpeculationMode.EXACT else None
            weights = weights_of(spec.numerics)
            member = await acquire_verifier(
                self.verifiers,
                request,
                numerics=numerics,
                weights=weights,
                full=full,
                lost=lost,
                patience_s=self.config.failover_s,
            )
            kind = kind_for(member, numerics, weights)
            if spec.mode is SpeculationMode.EXACT or weights_of(kind):
                spec = dataclasses.replace(spec, numerics=kind)
            verifier = RemoteVerifier(member.channel, member.address, request.metadata)
            hint = self.hint_of(member.address)
            drafting = Drafting(
                spec,
                sink.committed_token_ids,
                acquire,
                self._draft_plan(request),
                timeout_s=self.config.draft_timeout_ms * 1e-3,
                metrics=self.metrics,
                local=LocalMethods.of(member.address, member.info),
                hint=hint,
                trace=request.trace.session(spec) if request.trace is not None else None,
                trials=hint.trials if self.config.draft_ahead else None,
            )
            try:
                await verifier.open(spec)
                if await decode(spec, verifier, drafting, sink, place.gives_way):
                    return
                spec = dataclasses.replace(
                    spec, epoch=spec.epoch + 1, committed_token_ids=tuple(sink.committed_token_ids)
                )
            except Overloaded:
                if time.monotonic() >= overloaded_until:
                    raise
                # Sessions that have just ended may still stand there: a short wait, not an error. Others come first.
                is_refused = True
                full = set() if member.address in full else full | {member.address}
                spec = dataclasses.replace(spec, committed_token_ids=tuple(sink.committed_token_ids))
            except TargetReplaced:
                # Another verifier may still have its weights; where none has, acquire_verifier says so.
                num_committed = len(sink.committed_token_ids)
                num_fruitless = num_fruitless + 1 if num_committed == len(spec.committed_token_ids) else 0
                if num_fruitless >= MAX_FRUITLESS_FAILOVERS:
                    raise
                await self.verifiers.look_again()
                spec = dataclasses.replace(
                    spec, epoch=spec.epoch + 1, committed_token_ids=tuple(sink.committed_token_ids)
                )
            except VerifierLost as error:
                lost = error
                self.verifiers.mark_lost(member)
                self.metrics.failovers.inc()
                num_committed = len(sink.committed_token_ids)
                if request.trace is not None:
                    request.trace.lost_verifier(spec, member.address, num_committed)
                num_fruitless = num_fruitless + 1 if num_committed == len(spec.committed_token_ids) else 0
                if num_fruitless >= MAX_FRUITLESS_FAILOVERS:
                    raise
                spec = dataclasses.replace(
                    spec, epoch=spec.epoch + 1, committed_token_ids=tuple(sink.committed_token_ids)
                )
            finally:
                member.num_sessions -= 1
                await verifier.close()
                await drafting.close()
            if is_refused:
                async with self._asking_again:
                    await asyncio.sleep(OVERLOADED_WAIT_S)
            if place.gives_way():
                await place.take_again()
                overloaded_until = time.monotonic() + self.config.failover_s

    def _numerics(self, start: ChoiceStart) -> str | None:
        """Returns the kind of verifier that a choice needs; None: any. In rejection mode only its weights count."""
        if start.mode is not SpeculationMode.EXACT:
            return start.numerics if weights_of(start.numerics) else None
        # An older gateway has begun it, and did not say.
        return self.kinds.for_new_request() if start.numerics is None else start.numerics

    def _spec(self, request: ValidRequest, start: ChoiceStart, sink: CommitSink) -> SessionSpec:
        return SessionSpec(
            session_id=f"{request.request_id}-{start.choice_index}",
            epoch=start.epoch,
            prompt_token_ids=request.prompt_token_ids,
            committed_token_ids=tuple(sink.committed_token_ids),
            sampling_params=request.sampling_params,
            mode=start.mode,
            stream_key=start.stream_key,
            cache_salt=request.cache_salt,
            speculation=request.speculation,
            predicted_token_ids=request.predicted_token_ids,
            numerics=self._numerics(start),
        )

    def _detokenizer(self, request: ValidRequest) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(
            self.tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=request.skip_special_tokens,
            stop=request.stop,
            include_stop_str_in_output=request.include_stop_str_in_output,
            min_tokens=request.sampling_params.min_tokens,
            marker_tokens=request.marker_tokens,
            only_call=request.only_call.parser() if request.only_call is not None else None,
        )

    # ---- speculation ----

    def _num_speculative_tokens(self, request: ValidRequest) -> int:
        method = self._method(request)
        if method == METHOD_OFF:
            return 0
        if method == METHOD_AUTO and request.predicted_token_ids:  # known text is not limited by what methods guess
            return request.speculation.num_speculative_tokens or MAX_SPECULATIVE_TOKENS
        return request.speculation.num_speculative_tokens or self.speculative.num_speculative_tokens

    def _method(self, request: ValidRequest) -> str:
        method = request.speculation.method
        return self.speculative.method if method == METHOD_AUTO else method

    def hint_of(self, address: str) -> DraftHint:
        """Returns what sessions at a verifier have learned of drafting there; forgotten once it has left the fleet."""
        if address not in self._hints:
            present = {member.address for member in self.verifiers.members}
            self._hints = {known: hint for known, hint in self._hints.items() if known in present}
            self._hints[address] = DraftHint()
        return self._hints[address]

    def _draft_plan(self, request: ValidRequest) -> DraftPlan | None:
        """Returns the plan: a named method drafts the requested number of tokens; with `auto` the verifier decides."""
        method, token_tree = self._method(request), self._wants_tree(request)
        if method == METHOD_OFF:
            return None
        return DraftPlan(
            method,
            self._num_speculative_tokens(request),
            token_tree,
            max_round_us=round(1e3 * self.config.slo_itl_ms),
            offers=functools.partial(self._offers, token_tree=token_tree),
        )

    def _wants_tree(self, request: ValidRequest) -> bool:
        asked = request.speculation.token_tree
        return self.speculative.token_tree if asked is None else asked

    def _offers(self, *, token_tree: bool) -> tuple[DrafterOffer, ...]:
        return drafter_offers(self.drafters, self._target(), token_tree=token_tree)

    def _target(self) -> VerifierInfo | None:
        return next((member.info for member in self.verifiers.healthy()), None)

    def _lease_drafter(self, request: ValidRequest, wanted: str) -> Lease | None:
        """Leases a drafter for the wanted method; with `auto`, falls back to any other method before none."""
        target = self._target()
        lease = acquire_drafter(wanted, self.drafters, target, request.metadata)
        if lease is None and self._method(request) == METHOD_AUTO:
            lease = acquire_drafter(METHOD_AUTO, self.drafters, target, request.metadata)
        return lease
