"""A request after validation, and what comes back for it: the only types that go further in than the two doors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from shared.commit_log import LogEntry
from shared.messages import FinishReason, TokenLogprob, TokenOrigin
from shared.sampling_params import SamplingParams, SpeculationMode
from shared.tracing import Carrier

if TYPE_CHECKING:
    from gateway.tracing import RequestTrace

METHOD_AUTO = "auto"
METHOD_OFF = "off"


@dataclass(frozen=True)
class SpeculationRequest:
    """`method` is "auto", "off" or a draft method; 0 and None mean the server's default."""

    method: str = METHOD_AUTO
    num_speculative_tokens: int = 0
    mode: SpeculationMode | None = None
    token_tree: bool | None = None


class EntryLog(Protocol):
    """Where commits go before anybody sees them (shared.commit_log.ChoiceLog, or memory for offline use).

    Raises CommitRefused (this gateway may not write any more) or Unavailable.
    """

    async def append(self, entry: LogEntry) -> None: ...


@dataclass(frozen=True)
class ChoiceStart:
    """Where one choice begins at this gateway: at its beginning, or after what has been logged by another one.

    epoch: the first that this gateway may use. logged: what is there already. seen_len: the client has the tokens
    before this output index, so that no update may reach across it. numerics: the kind of verifier that an exact choice
    was begun for; None: not settled yet.
    """

    choice_index: int
    mode: SpeculationMode
    stream_key: int
    log: EntryLog
    epoch: int = 0
    logged: tuple[LogEntry, ...] = ()
    seen_len: int = 0
    numerics: str | None = None


@dataclass(frozen=True)
class ValidRequest:
    """One prompt, `n` choices. Everything in it has been checked against the model that is served.

    owner: name of the API key that it came with. starts: the choices that run at this gateway; the service fills them
    in (GatewayService.begin, resume), and trace, where requests are traced.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    speculation: SpeculationRequest = field(default_factory=SpeculationRequest)
    cache_salt: str = ""
    owner: str = ""
    starts: tuple[ChoiceStart, ...] = field(default=(), compare=False, repr=False)
    trace: RequestTrace | None = field(default=None, compare=False, repr=False)

    @property
    def metadata(self) -> Carrier:
        """What goes with every stream that is opened for the request."""
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

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, the bonus or corrected token included (vLLM's definition)."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

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
    """What one commit adds to one choice. The last update of a choice carries `finish_reason`."""

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
    # From the log of an earlier connection, not computed for this one.
    replayed: bool = False
