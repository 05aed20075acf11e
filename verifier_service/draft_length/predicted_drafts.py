"""One session's drafts from the output that its request predicts, with `auto`.

Not here: where the output stands in the prediction (shared/draft_policy/predicted_text), and how long a draft pays
(draft_length/prediction).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.drafting.methods.predicted import Follower
from outrider.engine.sampling.grammar import GrammarState
from outrider.shared.draft_policy.draft_methods import PREDICTION
from outrider.shared.messages import Commit, Proposal
from outrider.verifier_service.draft_length.prediction import PredictionCosts, PredictionLength


@dataclass
class PredictedDrafts:
    """Belongs to the engine's thread. grammar: a matcher of its own; None: the request has no grammar."""

    follower: Follower
    grammar: GrammarState | None = None
    _length: PredictionLength = field(default_factory=PredictionLength)
    _followed_len: int = 0
    _costs: PredictionCosts | None = None

    @classmethod
    def of(cls, predicted_token_ids: Sequence[int], grammar: GrammarState | None) -> PredictedDrafts:
        """Begins at the output's start. grammar: the request's."""
        return cls(Follower(predicted_token_ids), grammar.twin() if grammar is not None else None)

    def propose(self, output: list[int], most: int, costs: PredictionCosts) -> Proposal | None:
        """Returns the next round's draft of at most `most` tokens; None: drafting from the prediction does not pay."""
        self.follower.update(output)
        text = self.follower.text
        if text.position is None:
            return None
        self._costs, self._followed_len = costs, text.followed_len
        length = self._length.choose(text.followed_len, most, costs)
        token_ids = self.follower.chain(output, length, self.grammar) if length else []
        return Proposal(len(output), tuple(token_ids), PREDICTION) if token_ids else None

    def observe(self, commit: Commit) -> float:
        """Accounts for the commit of a round with its draft. Returns the seconds that the draft has added to it."""
        if self._costs is None:
            return 0.0
        num_proposed = commit.num_draft_tokens
        self._length.observe(self._followed_len, num_proposed, commit.num_accepted_tokens, self._costs)
        return self._costs.of(num_proposed)
