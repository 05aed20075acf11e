"""A request after validation, how it is answered, and what comes back for it: the types that travel in the gateway.

Not here: what a request is checked against (served), and how it is validated (openai/convert, servers/grpc_server).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from outrider.gateway.tool_calls.plan import OutputPlan
from outrider.shared.draft_policy import draft_methods
from outrider.shared.errors import CommitRefused
from outrider.shared.log.commit_log import LogEntry
from outrider.shared.messages import Commit, FinishReason, SessionSpec, Timings, TokenLogprob, TokenOrigin
from outrider.shared.request_params import Speculation
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.shared.tracing import Carrier

METHOD_AUTO = draft_methods.AUTO
METHOD_OFF = draft_methods.OFF


class EntryLog(Protocol):
    """The log that receives commits before anybody sees them (shared.log.commit_log.ChoiceLog, or memory for offline
    use).

    Raises CommitRefused (this gateway may not write any more) or Unavailable.
    """

    async def append(self, entry: LogEntry) -> None: ...


class SessionTrace(Protocol):
    """The trace of one session at one verifier (request/tracing).

    Contract: `add_round` follows each commit; verify_s and draft_s are how long the gateway waited for each.
    """

    def add_round(self, commit: Commit, method: str, verify_s: float, draft_s: float, draft: Timings) -> None: ...

    def add_event(self, name: str) -> None: ...


class RequestTrace(Protocol):
    """The trace of one request, as the code that runs the request sees it (request/tracing).

    Contract: no method waits or raises. `metadata` goes with every stream that is opened for the request.
    `lost_verifier`: the session's next epoch continues at another verifier, after `num_committed` tokens. Whatever
    answers the request ends its trace (Prepared.end_trace).
    """

    @property
    def metadata(self) -> Carrier: ...

    def observe(self, update: GenerationUpdate) -> None: ...

    def lost_verifier(self, spec: SessionSpec, address: str, num_committed: int) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def session(self, spec: SessionSpec) -> SessionTrace: ...


class NoLog:
    """An EntryLog of a request that cannot be resumed: refuses gaps and repeats, stores nothing."""

    def __init__(self) -> None:
        self._end = 0

    async def append(self, entry: LogEntry) -> None:
        if entry.base_len != self._end:
            raise CommitRefused(f"an append at output index {entry.base_len} of a log that ends at {self._end}")
        self._end = entry.end


@dataclass(frozen=True)
class ChoiceStart:
    """The start of one choice at this gateway: at its beginning, or after what another gateway has logged of it.

    epoch: the first that this gateway may use. log_epoch: what is added to epochs in the log and in event ids, drawn at
    random; 0 where tokens come out the same again. logged: what is there already. seen_len: the client has the tokens
    before this output index, so that no update may reach across it. numerics: the kind of verifier that an exact choice
    was begun for; None: not settled yet.
    """

    choice_index: int
    mode: SpeculationMode
    stream_key: int
    log: EntryLog
    epoch: int = 0
    log_epoch: int = 0
    logged: tuple[LogEntry, ...] = ()
    seen_len: int = 0
    numerics: str | None = None

    @property
    def is_new(self) -> bool:
        """True if no gateway has decoded any of it yet."""
        return not (self.epoch or self.logged)


@dataclass(frozen=True)
class ValidRequest:
    """One prompt, `n` choices. Everything in it has been checked against the model that is served.

    marker_tokens: special tokens that the text shows as symbols, for a parser (tool_calls/symbols.py). only_call: how
    the call is read that the output ends with; None: it may have any number of them.
    predicted_token_ids: what the request predicts for its output.
    owner: name of the API key that it came with. caller: in whose share of the verifiers it runs: the key's name, or
    without keys an address. starts: the choices that run at this gateway; the service fills them
    in (GatewayService.begin, resume), and trace, where requests are traced.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    speculation: Speculation = field(default_factory=lambda: Speculation(method=METHOD_AUTO))
    cache_salt: str = ""
    marker_tokens: tuple[str, ...] = ()
    only_call: OutputPlan | None = None
    predicted_token_ids: tuple[int, ...] = ()
    owner: str = ""
    caller: str = field(default="", compare=False)
    starts: tuple[ChoiceStart, ...] = field(default=(), compare=False, repr=False)
    trace: RequestTrace | None = field(default=None, compare=False, repr=False)

    @property
    def metadata(self) -> Carrier:
        """The metadata of every stream that is opened for the request."""
        return self.trace.metadata if self.trace is not None else ()


@dataclass(frozen=True)
class SpeculationSummary:
    """Figures of one finished choice, under vLLM's names; only emitted tokens count."""

    num_spec_tokens: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_histogram: tuple[int, ...]
    per_step_accepted: tuple[int, ...]
    per_step_drafted: tuple[int, ...]
    # Tokens of the rounds with a draft, bonus and corrected tokens included.
    num_emitted_tokens: int
    # microseconds saved against plain decoding, estimated by the verifier; negative: speculation has cost time.
    saved_us: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens per round with a draft: vLLM's definition, but for a last round that ends on a draft token."""
        return self.num_emitted_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(frozen=True)
class Round:
    """One round of a choice, which put `num_tokens` tokens from output index `base_len` on into the output.

    drafter: its address, "" offline. drafter and method are "" in a round without a draft.
    """

    index: int
    base_len: int
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    method: str = ""
    drafter: str = ""


@dataclass(frozen=True)
class GenerationUpdate:
    """The part of one choice that one commit adds. The last update of a choice carries `finish_reason`."""

    choice_index: int
    base_len: int
    token_ids: tuple[int, ...]
    text: str
    # Per token: the text that this token completed; joined they are `text` but for what a stop string removed.
    token_texts: tuple[str, ...]
    origins: tuple[TokenOrigin, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    # The one that made these tokens; of several updates merged, all.
    rounds: tuple[Round, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    # The stop string, or the stop token id, that ended the output.
    stop_reason: str | int | None = None
    speculation: SpeculationSummary | None = None
    # Of the session that the tokens came from, if they would come out differently when decoded again; else 0.
    epoch: int = 0
    # From the log of an earlier connection, not computed for this one.
    replayed: bool = False
    # time.monotonic() when the commit reached the gateway.
    committed_at_s: float = field(default=0.0, compare=False)
