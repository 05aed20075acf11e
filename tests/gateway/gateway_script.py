"""A GatewayService for tests of the two servers: tokens come from a script instead of a model.

It behaves as the contract says: choices interleave, closing it frees what it holds (`num_open` counts that), the
text goes through the real detokenizer, stop strings included. A request that is resumed is told from its beginning, as
from a log; who may resume what, and the log itself, are tested in test_request_start.py and tests/e2e.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.gateway.admission.readiness import ReadyState
from outrider.gateway.fleet.view import FleetView, fleet_view
from outrider.gateway.openai.receipt_signature import ReceiptKey
from outrider.gateway.openai.usage import SpecMetricsLevel
from outrider.gateway.request.answers import AnswerKind, Prepared, Wanted
from outrider.gateway.request.detokenizer import IncrementalDetokenizer
from outrider.gateway.request.served import RequestLimits, Served, ServedModel
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import ChoiceStart, GenerationUpdate, Round, SpeculationSummary, ValidRequest
from outrider.gateway.responses.store import ResponseStore
from outrider.shared.errors import UnknownSession
from outrider.shared.log.commit_log import LogEntry
from outrider.shared.messages import FinishReason, TokenLogprob, TokenOrigin
from outrider.shared.sampling_params import SpeculationMode

DEMO_TARGET = Path(__file__).parents[2] / "models" / "demo-target"
ORIGINS = (TokenOrigin.ACCEPTED, TokenOrigin.ACCEPTED, TokenOrigin.CORRECTED, TokenOrigin.TARGET, TokenOrigin.BONUS)


@dataclass
class Script:
    """`text` is what the model says, `commit_len` tokens per commit; `error` is raised before update `error_at`. With
    `heard`, an error or an early end waits until it is set.
    """

    text: str = "Paris is the capital 漢字 👩‍👩‍👧 of France."
    commit_len: int = 3
    delay_s: float = 0.0
    error: Exception | None = None
    error_at: int = 0
    endless: bool = False
    ends_early: bool = False
    heard: asyncio.Event | None = None
    saved_us: int = 120_500
    epoch: int = 0


class NoLog:
    """The script is not written anywhere."""

    async def append(self, entry: LogEntry) -> None:
        return None


@dataclass
class ScriptedService:
    tokenizer: Tokenizer
    script: Script = field(default_factory=Script)
    limits: RequestLimits = field(default_factory=RequestLimits)
    spec_metrics: SpecMetricsLevel = SpecMetricsLevel.SUMMARY
    version: str = "1.2.3"
    state: ReadyState = field(default_factory=lambda: ReadyState(True))
    model: ServedModel = field(
        default_factory=lambda: ServedModel("demo", 512, 4096, ("ngram", "draft_model"), created=1_700_000_000)
    )
    receipt_key: ReceiptKey | None = None
    response_store: ResponseStore | None = None
    num_open: int = 0
    num_opened: int = 0
    requests: list[ValidRequest] = field(default_factory=list)
    begun: dict[str, tuple[AnswerKind, Prepared]] = field(default_factory=dict)
    wanted: list[Wanted] = field(default_factory=list)

    @property
    def served(self) -> Served:
        return Served(self.model, self.tokenizer, self.limits)

    def ready(self) -> ReadyState:
        return self.state

    def render_metrics(self) -> bytes:
        return b"# HELP outrider:up One.\n"

    def fleet(self) -> FleetView:
        return fleet_view(self.version, self.model.name, (), ())

    def begin(self, kind: AnswerKind, prepared: Prepared) -> Prepared:
        # The ids of items and calls depend on the second: two answers that are compared must not differ by it.
        prepared = replace(prepared, options=replace(prepared.options, created=self.model.created))
        self.begun[prepared.options.answer_id] = kind, prepared
        return started(prepared)

    async def resume(self, wanted: Wanted) -> Prepared:
        self.wanted.append(wanted)
        kind, prepared = self.begun.get(wanted.request_id, (None, None))
        if prepared is None or wanted.kind not in (None, kind):
            raise UnknownSession(f"no request {wanted.request_id!r} is known here; it may have expired")
        return started(prepared)

    async def generate(self, request: ValidRequest) -> AsyncGenerator[GenerationUpdate, None]:
        self.requests.append(request)
        self.num_open += 1
        self.num_opened += 1
        try:
            rows = [self._choice(request, start.choice_index) for start in request.starts]
            longest = max(len(row) for row in rows)
            for step in range(longest):
                for row in rows:
                    if self.script.error is not None and step == self.script.error_at:
                        await self._until_heard()
                        raise self.script.error
                    await asyncio.sleep(self.script.delay_s)
                    if step < len(row):
                        yield replace(row[step], committed_at_s=time.monotonic())
            if self.script.endless:
                await asyncio.Event().wait()
            if self.script.ends_early:
                await self._until_heard()
        finally:
            await asyncio.sleep(0)  # real clean-up takes a turn of the loop too
            self.num_open -= 1

    async def _until_heard(self) -> None:
        if self.script.heard is not None:
            await self.script.heard.wait()

    def _choice(self, request: ValidRequest, choice: int) -> list[GenerationUpdate]:
        """All updates of one choice; choice k says the text k + 1 times."""
        params = request.sampling_params
        token_ids = self.tokenizer.encode(self.script.text * (choice + 1), add_special_tokens=False)
        finish = FinishReason.LENGTH if len(token_ids) >= params.max_tokens else FinishReason.STOP
        token_ids = token_ids[: params.max_tokens]
        detokenizer = IncrementalDetokenizer(
            self.tokenizer,
            request.prompt_token_ids,
            request.skip_special_tokens,
            request.stop,
            request.include_stop_str_in_output,
            params.min_tokens,
            request.marker_tokens,
            request.only_call.parser() if request.only_call is not None else None,
        )
        updates: list[GenerationUpdate] = []
        for base_len in range(0, len(token_ids), self.script.commit_len):
            group = token_ids[base_len : base_len + self.script.commit_len]
            piece = detokenizer.process(group)
            kept = group[: piece.num_tokens_kept]
            last = base_len + len(group) == len(token_ids) or piece.end is not None
            ended = last and not (self.script.endless or self.script.ends_early)
            updates.append(
                GenerationUpdate(
                    choice_index=choice,
                    base_len=base_len,
                    token_ids=tuple(kept),
                    text=piece.text + (detokenizer.finish() if last else ""),
                    token_texts=piece.token_texts,
                    origins=tuple(ORIGINS[(base_len + place) % len(ORIGINS)] for place in range(len(kept))),
                    logprobs=self._logprobs(kept, params.num_logprobs, params.logprob_token_ids),
                    prompt_logprobs=self._prompt_logprobs(request) if base_len == 0 else (),
                    rounds=(Round(len(updates), base_len, len(kept), 4, len(kept) - 1, "ngram", "drafter-a:7002"),),
                    # A later choice finds what the first one computed.
                    num_cached_tokens=2 + 100 * choice if base_len == 0 else 0,
                    finish_reason=(FinishReason.STOP if piece.end else finish) if ended else None,
                    stop_reason=piece.end.stop_string if piece.end else None,
                    speculation=self._speculation() if ended and request.speculation.method != "off" else None,
                    epoch=self.script.epoch,
                )
            )
            if last:
                break
        return updates

    def _speculation(self) -> SpeculationSummary:
        steps = (0, 1, 2, 3), (5, 5, 5, 5)
        return SpeculationSummary(5, 4, 20, 6, (1, 1, 1, 1), *steps, 10, self.script.saved_us)

    def _logprobs(
        self, token_ids: list[int], num_top: int | None, named: tuple[int, ...] = ()
    ) -> tuple[TokenLogprob, ...]:
        """Token t has log-probability -t/1000 and rank 2; the likeliest others are 10, 11, ..., or those named."""
        if num_top is None:
            return ()
        top_ids = named or tuple(range(10, 10 + num_top))
        top_logprobs = tuple(-0.5 - place for place in range(len(top_ids)))
        return tuple(TokenLogprob(-token_id / 1000, 2, top_ids, top_logprobs) for token_id in token_ids)

    def _prompt_logprobs(self, request: ValidRequest) -> tuple[TokenLogprob, ...]:
        return self._logprobs(list(request.prompt_token_ids), request.sampling_params.num_prompt_logprobs)


def started(prepared: Prepared) -> Prepared:
    return replace(
        prepared,
        requests=tuple(
            replace(
                request,
                starts=tuple(ChoiceStart(choice, SpeculationMode.EXACT, 0, NoLog()) for choice in range(request.n)),
            )
            for request in prepared.requests
        ),
    )


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
