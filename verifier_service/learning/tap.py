"""Copies what a served session has to teach: its tokens and the target's hidden states. Belongs to the engine's thread.

Not taken: sessions with a cache salt, which asks to be kept apart, or where each salt has a head of its own, those
without one; those that say `speculation.learn: false`; and seeded ones in rejection mode. The last are a matter of law,
not of privacy: their noise is a function of the request, so that a head which was taught the outcome would draft with
knowledge of the numbers that judge its drafts (docs/correctness.md).
"""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.shared.messages import SessionSpec
from outrider.shared.sampling_params import SpeculationMode
from outrider.verifier_service.hidden_states import ReadRows
from outrider.verifier_service.learning.places import NO_PLACE, SaltPlaces
from outrider.verifier_service.session import VerifierSession

# tokens; longest window: attention over longer ones costs a training step more than it teaches
WINDOW_TOKENS = 256
# tokens of output; fewer teach nothing about deeper drafts
_FEWEST_TOKENS = 16
# windows; most of one session, its last: a long answer is one text, and copying must not hold up the other sessions
_MOST_WINDOWS = 4
# windows; waiting for the learner, which takes them in microseconds unless it has stopped
_QUEUED = 64
# sessions; one in ten is held back: heads are judged on it, and never trained on it
_HELD_BACK = 10


@dataclass(frozen=True)
class TappedWindow:
    """Consecutive tokens of a session, and a row of hidden states for each; from `first_counted` on they are output.

    place: the number of its salt's place.
    """

    token_ids: tuple[int, ...]
    first_counted: int
    rows: torch.Tensor
    is_held_back: bool
    place: int = NO_PLACE


class Tap:
    """Windows of ended sessions. `read_rows`: as for local drafting; `layers`: those that the learner needs.

    places: where each salt has a head of its own.
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        read_rows: ReadRows,
        count: Callable[[str, int], None],
        places: SaltPlaces | None = None,
    ) -> None:
        """count: called with what became of output tokens ("taken", "dropped" or "private"), and their number."""
        self._layers = layers
        self._read_rows = read_rows
        self._count = count
        self._places = places
        self.windows: queue.Queue[TappedWindow] = queue.Queue(maxsize=_QUEUED)

    def take(self, session: VerifierSession) -> None:
        """Copies the session's windows; drops them where the learner is behind. Call while it has its KV blocks."""
        num_tokens = session.num_computed - session.prompt_len
        if num_tokens < _FEWEST_TOKENS or session.table is None:
            return
        if not may_learn_from(session.spec, per_salt=self._places is not None):
            self._count("private", num_tokens)
            return
        place = NO_PLACE
        if self._places is not None:
            place = self._places.serve(session.spec.cache_salt, num_tokens)
            if place == NO_PLACE:
                self._count("dropped", num_tokens)
                return
        first = max(0, session.num_computed - _MOST_WINDOWS * WINDOW_TOKENS)
        [(first, rows)] = self._read_rows([(session, first)], self._layers)
        held_back = is_held_back(session.spec.session_id)
        for end in range(first + len(rows), first, -WINDOW_TOKENS):
            start = max(first, end - WINDOW_TOKENS)
            first_counted = max(0, session.prompt_len - start)
            if end - start - first_counted < _FEWEST_TOKENS:
                break
            token_ids = tuple(session.token_ids[start:end])
            window = TappedWindow(token_ids, first_counted, rows[start - first : end - first], held_back, place)
            try:
                self.windows.put_nowait(window)
                self._count("taken", len(token_ids) - first_counted)
            except queue.Full:
                self._count("dropped", len(token_ids) - first_counted)


def may_learn_from(spec: SessionSpec, *, per_salt: bool = False) -> bool:
    """Returns whether a head may be trained on the session: one for all, or one of its salt's."""
    is_replayable = spec.mode is SpeculationMode.REJECTION and spec.sampling_params.seed is not None
    return bool(spec.cache_salt) is per_salt and not is_replayable and spec.speculation.learn is not False


def is_held_back(session_id: str) -> bool:
    """Returns whether heads are judged on the session, and none is trained on it."""
    return hashlib.blake2b(session_id.encode(), digest_size=1).digest()[0] % _HELD_BACK == 0
