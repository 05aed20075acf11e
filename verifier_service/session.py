"""One session at the verifier: its tokens, its computed KV, and the step in progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.engine.attention.block_manager import BlockTable
from outrider.engine.recurrent.table import SessionState
from outrider.engine.sampling.laws import LogitsProcessor
from outrider.shared.errors import CommitRefused, InvalidRequest
from outrider.shared.messages import (
    AutoDrafts,
    Commit,
    LocalDrafts,
    NextDraft,
    Proposal,
    SessionSpec,
    TokenLogprob,
    VerifyStep,
)
from outrider.verifier_service.draft_length.predicted_drafts import PredictedDrafts

# Called on the engine's thread with each commit, or with the error that ends the session.
OnReply = Callable[[Commit | Exception], None]


@dataclass(frozen=True)
class LocalDraft:
    """The result of local drafting for one session. proposal: None if the method found none. seconds: of the whole
    drafted batch.
    """

    asked: LocalDrafts
    proposal: Proposal | None
    seconds: float


@dataclass
class VerifierSession:
    """One session. token_ids: prompt and committed output. KV of positions [0, num_computed) is in the cache."""

    spec: SessionSpec
    processor: LogitsProcessor
    on_reply: OnReply
    opened_at: float
    token_ids: list[int]
    # Acceptance rule for chains with laws: a key of round.CHAIN_RULES.
    chain_rule: str = "block"
    table: BlockTable | None = None
    # Recurrent state, at position num_computed between forwards. None: not open, or the model has no recurrent layers.
    state: SessionState | None = None
    num_computed: int = 0
    num_cached_tokens: int = 0
    step: VerifyStep | None = None
    step_arrived_at: float = 0.0
    # Seconds from the commit before this step to the step: of the gateway, and its drafter if it asked one.
    away_s: float = 0.0
    # The choices of `auto` (None: the gateway decides), its choice for the next round (None: nothing), the drafter's
    # task for this round, and the output that each method has read.
    auto: AutoDrafts | None = None
    auto_choice: LocalDrafts | None = None
    wanted: NextDraft | None = None
    # Drafts from the request's prediction; None: it predicts nothing, or no round with `auto` has begun.
    predicted: PredictedDrafts | None = None
    read_len: dict[str, int] = field(default_factory=dict)
    # Tokens that the free run in progress may still commit; 0: no free run.
    free_run_left: int = 0
    # The local draft for the next round; None: not drafted yet.
    local_draft: LocalDraft | None = None
    # Positions whose hidden states have been sent for the step in progress.
    hidden_sent_len: int = 0
    # When it was sent a commit that no step has followed yet; and its mean time from a commit to its next step.
    replied_at: float | None = None
    return_s: float | None = None
    has_replied: bool = False
    # When its newest commit was made; None: no commit yet.
    committed_at: float | None = None
    finished: bool = False
    # CPU time of its grammar's masks in its newest round; and whether it waits for others' rounds because of it.
    mask_s: float = 0.0
    sits_out: bool = False
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def prompt_len(self) -> int:
        return len(self.spec.prompt_token_ids)

    @property
    def committed_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def is_ready(self) -> bool:
        """True if the next forward can have rows of it."""
        return self.step is not None and not self.sits_out

    @property
    def masks_s(self) -> float:
        """CPU time of all its masks so far."""
        grammar = self.processor.grammar
        return grammar.spent.seconds if grammar is not None else 0.0

    @property
    def num_pending(self) -> int:
        """Committed tokens whose KV is not computed; at least one when logits are wanted."""
        return len(self.token_ids) - self.num_computed

    @property
    def local_drafts(self) -> LocalDrafts | None:
        """The local drafting for the next round of a free run, if the verifier serves the method; None: no free run."""
        if self.step is None or self.step.proposal is not None or self.free_run_left <= 0:
            return None
        return self.auto_choice if self.auto is not None else self.step.local_drafts

    @property
    def can_draft_from_prediction(self) -> bool:
        """True if the request predicts its output and the next round, of a free run, can begin with a draft."""
        if self.step is None or self.step.proposal is not None or self.free_run_left <= 0:
            return False
        return bool(self.spec.predicted_token_ids) and self.num_pending == 1

    @property
    def runs_to_end(self) -> bool:
        """True if the free run in progress lasts to the end of the output, unless the verifier ends it."""
        return (
            self.free_run_left > 0 and self.free_run_left >= self.spec.sampling_params.max_tokens - self.committed_len
        )

    def unread_by(self, method: str) -> int:
        """Tokens of prompt and output that the method had not read when it last drafted."""
        read_len = self.read_len.get(method)
        return len(self.token_ids) if read_len is None else self.committed_len - read_len

    @property
    def num_wanted_rows(self) -> int:
        """Rows that the step in progress needs, limits aside."""
        drafts = self.local_drafts
        if drafts is None or self.proposal is not None:
            return self.num_pending + (len(self.proposal.token_ids) if self.proposal is not None else 0)
        return self.num_pending + drafts.num_draft_tokens

    @property
    def proposal(self) -> Proposal | None:
        """The proposal to verify in the next round: the step's, or in a free run the local draft."""
        sent = self.step.proposal if self.step is not None else None
        return sent if sent is not None or self.local_draft is None else self.local_draft.proposal

    def draft_room(self, max_model_len: int) -> int:
        """Returns the most draft tokens that the next round can use: one more token follows them before the output, the
        context or the run ends. Depends on lengths only, never on tokens.
        """
        params = self.spec.sampling_params
        room = min(params.max_tokens - self.committed_len - 1, max_model_len - len(self.token_ids) - 1)
        if self.step is None:
            return room
        most = self.step.max_new_tokens if self.step.proposal is not None else self.free_run_left
        return min(room, most - 1) if most else room

    def begin(self, step: VerifyStep) -> None:
        """Begins a step.

        Raises CommitRefused for another epoch; InvalidRequest after the end, or if tokens before it are missing.
        """
        if step.epoch != self.spec.epoch:
            raise CommitRefused(f"step of epoch {step.epoch} at a session of epoch {self.spec.epoch}", param="epoch")
        if step.base_len > self.committed_len:
            raise InvalidRequest(
                f"step at {step.base_len}, but only {self.committed_len} tokens are committed", param="base_len"
            )
        if self.finished and step.base_len == self.committed_len:
            raise InvalidRequest(f"the output has ended at {self.committed_len}", param="base_len")
        self.step = step
        self.auto = step.auto_drafts or self.auto
        self.step_arrived_at = time.perf_counter()
        self.hidden_sent_len = 0
        self.free_run_left = step.max_new_tokens if step.proposal is None else 0
        self.local_draft = None

    def end_round(self, commit: Commit, ended: float) -> None:
        """Records a commit whose tokens are in `token_ids`. ended: when its forward did."""
        self.has_replied = True
        self.committed_at = ended
        self.finished = commit.finish_reason is not None
        self.prompt_logprobs.clear()
        self.free_run_left -= len(commit.token_ids)
        self.local_draft = None
        if commit.more:
            self.step_arrived_at = ended
        else:
            self.step = None


def reconcile(proposal: Proposal, base_len: int, output_token_ids: list[int]) -> Proposal | None:
    """The part of a proposal from `base_len` on, by absolute index; None if it contradicts the committed output.

    A late chain whose first tokens equal what was committed since is used from there on. This selects no token by its
    own value: the remaining tokens were drawn given exactly the prefix that is now committed.
    """
    offset = base_len - proposal.base_len
    if offset == 0:
        return proposal
    passed = proposal.token_ids[:offset] if offset > 0 else ()
    if offset < 0 or proposal.parents or list(passed) != output_token_ids[proposal.base_len : base_len]:
        return None
    if offset >= len(proposal.token_ids):
        return None
    return Proposal(
        base_len=base_len,
        token_ids=proposal.token_ids[offset:],
        method=proposal.method,
        laws=proposal.laws[offset:],
        confidence=proposal.confidence[offset:],
    )
