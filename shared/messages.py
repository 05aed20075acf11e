"""The messages between the services, as plain values. `wire` converts them to protobuf and back.

Indices: an output index counts generated tokens from 0, the prompt does not count. Ranges are half-open.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from outrider.shared.request_params import Speculation
from outrider.shared.sampling_params import SamplingParams, SpeculationMode

# Counts of a sparse law sum to this: 16 bits keep the worst rounding of a top-32 law under 0.05 % of mass.
LAW_TOTAL = 1 << 16
# Tokens in a law on the wire: 160 bytes a token, at most one point of acceptance lost up to 1.6 nats of entropy.
LAW_SIZE = 32


class TokenOrigin(enum.IntEnum):
    """The origin of a committed token (values are those of the wire)."""

    TARGET = 1
    ACCEPTED = 2
    CORRECTED = 3
    BONUS = 4


class FinishReason(enum.IntEnum):
    STOP = 1
    LENGTH = 2
    ABORT = 3


@dataclass(frozen=True)
class SparseLaw:
    """A law over few tokens: probability of token_ids[i] is counts[i] / LAW_TOTAL."""

    token_ids: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Proposal:
    """Draft tokens that would follow output index `base_len`; a chain if `parents` is empty, else a tree."""

    base_len: int
    token_ids: tuple[int, ...]
    method: str
    parents: tuple[int, ...] = ()
    laws: tuple[SparseLaw, ...] = ()
    confidence: bytes = b""


@dataclass(frozen=True)
class Timings:
    """The timings of one reply, in microseconds."""

    queue_us: int = 0
    forward_us: int = 0
    total_us: int = 0
    sample_us: int = 0
    # Sessions that were served together.
    batch_sessions: int = 1
    # Open sessions of a verifier, in this forward or not; 0: unknown.
    open_sessions: int = 0
    # A verifier's local drafting before the forward, for all sessions it drafted for; 0: none for this session.
    draft_us: int = 0


@dataclass(frozen=True)
class TokenLogprob:
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class HiddenStates:
    """Raw rows of the target's hidden states, [layers, num_rows, width], little-endian."""

    first_index: int
    layers: tuple[int, ...]
    num_rows: int
    width: int
    dtype: str
    data: bytes

    @property
    def end(self) -> int:
        """Output index after the last row."""
        return self.first_index + self.num_rows


@dataclass(frozen=True)
class SessionSpec:
    """All that a verifier or a drafter needs to start, or to take over, a session."""

    session_id: str
    epoch: int
    prompt_token_ids: tuple[int, ...]
    committed_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    mode: SpeculationMode
    stream_key: int
    cache_salt: str = ""
    # The request's choices, unresolved; `method` is the one that this session is opened for.
    speculation: Speculation = field(default_factory=Speculation)
    method: str = ""
    # The output that the request predicts; used for drafts only.
    predicted_token_ids: tuple[int, ...] = ()
    # The only kind of verifier that will do (VerifierInfo.numerics); None: any. Not sent to drafters.
    numerics: str | None = None


@dataclass(frozen=True)
class HiddenStatesRequest:
    """Rows wanted: of these layers, from output index `first_index` on (negative: into the prompt)."""

    layers: tuple[int, ...]
    first_index: int


@dataclass(frozen=True)
class LocalDrafts:
    """A request for local drafting at the verifier: one of its `local_methods`, and the most tokens per round."""

    method: str
    num_draft_tokens: int
    token_tree: bool = False


@dataclass(frozen=True)
class DrafterOffer:
    """A method that drafters serve, and the most tokens that it drafts; 0: no limit."""

    method: str
    max_num_draft_tokens: int = 0


@dataclass(frozen=True)
class AutoDrafts:
    """The choices of `auto` in addition to the verifier's own methods. max_round_us: bounds a round; 0: no bound."""

    max_num_draft_tokens: int
    token_tree: bool = False
    drafters: tuple[DrafterOffer, ...] = ()
    max_round_us: int = 0


@dataclass(frozen=True)
class NextDraft:
    """A drafter's task for the next round, and the time that its draft is worth waiting for."""

    method: str
    num_draft_tokens: int
    patience_us: int = 0


@dataclass(frozen=True)
class LastDraft:
    """The outcome of the last NextDraft.

    late: the draft did not come in time. refused: why no drafter was asked; "": one was.
    """

    waited_us: int = 0
    drafter_us: int = 0
    late: bool = False
    refused: str = ""


@dataclass(frozen=True)
class VerifyStep:
    """Cut back to `base_len`, score the proposal, commit. `max_new_tokens` > 0 with no proposal: free run."""

    epoch: int
    base_len: int
    proposal: Proposal | None = None
    max_new_tokens: int = 0
    hidden_states: HiddenStatesRequest | None = None
    # Local drafting of a free run: each round begins with a draft of the verifier's own.
    local_drafts: LocalDrafts | None = None
    # The verifier decides what is drafted; None: as in the step before.
    auto_drafts: AutoDrafts | None = None
    last_draft: LastDraft | None = None


@dataclass(frozen=True)
class Commit:
    """Tokens that are part of the output for good, from output index `base_len` on."""

    epoch: int
    base_len: int
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    timings: Timings = field(default_factory=Timings)
    hidden_states: HiddenStates | None = None
    more: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    # The request for local drafting in this round.
    local_drafts: LocalDrafts | None = None
    # The drafter's task for the next round.
    next_draft: NextDraft | None = None
    # Estimated time that speculation has saved the session in this round; 0: not known.
    saved_us: int = 0
    # Known to the gateway alone: who drafted what was scored, and how; "" where nothing was.
    drafter: str = ""
    draft_method: str = ""

    @property
    def end(self) -> int:
        """Output index after the last token."""
        return self.base_len + len(self.token_ids)


@dataclass(frozen=True)
class DraftStep:
    """The tokens committed since the last step, and the number of tokens to propose after them."""

    epoch: int
    base_len: int
    committed_token_ids: tuple[int, ...]
    num_draft_tokens: int
    hidden_states: tuple[HiddenStates, ...] = ()
    max_tree_nodes: int = 0
    max_branches: int = 0

    @property
    def committed_len(self) -> int:
        return self.base_len + len(self.committed_token_ids)


@dataclass(frozen=True)
class ProposalReply:
    epoch: int
    proposal: Proposal
    timings: Timings
    missing_hidden_from: int | None = None


@dataclass(frozen=True)
class CertificateCheck:
    name: str
    holds: bool
    detail: str = ""


@dataclass(frozen=True)
class RowInvarianceCertificate:
    holds: bool
    failing_operation: str = ""
    checks: tuple[CertificateCheck, ...] = ()


@dataclass(frozen=True)
class DraftHead:
    """One of several heads of a draft method, and the drafts of the sessions that have ended with it."""

    name: str
    model: str = ""
    version: int = 0
    num_sessions: int = 0
    num_drafts: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True)
class DraftMethodInfo:
    name: str
    model: str = ""
    hidden_layers: tuple[int, ...] = ()
    max_num_draft_tokens: int = 0
    proposes_trees: bool = False
    max_model_len: int = 0
    vocab_size: int = 0
    takes_hidden_history: bool = False
    hidden_size: int = 0
    version: int = 0
    # Where there are several for one target.
    heads: tuple[DraftHead, ...] = ()

    def limit(self, *, token_tree: bool) -> int:
        """The most tokens that it drafts; 0: no known limit. In trees only the depth is limited, not the tokens."""
        return 0 if token_tree and self.proposes_trees else self.max_num_draft_tokens

    def fits(self, *, vocab_size: int, hidden_size: int, num_hidden_layers: int) -> bool:
        """Returns whether it can draft for such a target: same token ids, and all hidden states it needs exist."""
        return (
            self.vocab_size in (0, vocab_size)
            and self.hidden_size in (0, hidden_size)
            and all(layer <= num_hidden_layers for layer in self.hidden_layers)
        )


@dataclass(frozen=True)
class Learning:
    """What a verifier's own draft head, or one for each cache salt, has learned from the texts that it served.

    Tokens are of outputs: learned from, lost as the learner was behind or had no place for their salt, and of requests
    that are left out. Heads stood their trial, were rolled back by it, or were not tried out, the last one because of
    `refusal`. tokens_before and tokens_after: expected a round on held-back text at the last judgement, of the head
    that served and the one in training. num_salts: whose text is learned from apart; num_salt_heads: those of them that
    a learned head drafts for.
    """

    num_tokens: int = 0
    num_dropped_tokens: int = 0
    num_private_tokens: int = 0
    num_taken: int = 0
    num_rolled_back: int = 0
    num_refused: int = 0
    tokens_before: float = 0.0
    tokens_after: float = 0.0
    refusal: str = ""
    num_salts: int = 0
    num_salt_heads: int = 0


# in a kind (VerifierInfo.numerics): what follows is the digest of the weights, where those can be replaced
WEIGHTS_MARK = "/weights-"


def weights_of(numerics: str | None) -> str:
    """Returns the digest of the weights in a kind; empty where it names none."""
    return (numerics or "").partition(WEIGHTS_MARK)[2]


def of_other_weights(numerics: str, others: str) -> bool:
    """Returns whether both kinds name their weights, and those differ."""
    ours, theirs = weights_of(numerics), weights_of(others)
    return bool(ours and theirs) and ours != theirs


@dataclass(frozen=True)
class VerifierInfo:
    model: str
    version: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    hidden_size: int
    num_hidden_layers: int
    num_blocks: int
    num_free_blocks: int
    block_size: int
    num_sessions: int
    num_waiting: int
    max_sessions: int
    noise_version: int
    certificate: RowInvarianceCertificate
    # The arithmetic, measured: equal text, equal bits. Empty: a verifier that does not tell.
    numerics: str = ""
    # The methods of its own drafting.
    local_methods: tuple[DraftMethodInfo, ...] = ()
    # States of recurrent layers; 0: the model has no such layers.
    num_state_slots: int = 0
    num_free_state_slots: int = 0
    # Microseconds of a round while 1, 2, 4, ... sessions are open; empty: a verifier that does not tell.
    round_us: tuple[int, ...] = ()
    # None: its drafting does not learn.
    learning: Learning | None = None
    # Of the target's weights: 1 for the first; 0: they cannot be replaced while it serves.
    target_version: int = 0
    # The kind of the weights that take over soon, as in `numerics`; sessions for it wait until they have. Empty: none.
    next_numerics: str = ""


@dataclass(frozen=True)
class DrafterInfo:
    version: str
    methods: tuple[DraftMethodInfo, ...]
    noise_version: int
    num_sessions: int
    max_sessions: int
    tokenizer_digest: str = ""
