"""Assisted generation of transformers with drafts from Outrider's drafters.

    drafts = outrider.transformers.Drafts(model, drafters=["host:7002"], num_draft_tokens=4)
    model.generate(**inputs, max_new_tokens=100, custom_generate=drafts)

The loop is transformers' own assisted decoding, so the model decides every token: it draws them as it would without,
and keeps the draft's as far as they are the same. A drafter that is late, away or wrong costs speed only. One text at a
time, as assisted decoding has it.
"""

from __future__ import annotations

import itertools
import logging
import threading
from typing import Any

import numpy as np

from outrider.plugins.fleet import Ask, Fleet
from outrider.plugins.options import Options
from outrider.plugins.rows import Session
from outrider.plugins.usable import Draft, digest_of, usable

log = logging.getLogger(__name__)


class Drafts:
    """The drafters of one model, for `generate(custom_generate=...)`; several threads may use it."""

    def __init__(self, model: Any, *, num_draft_tokens: int = 4, **options: Any) -> None:
        """options: as vLLM's proposer has them (options.Options), but auto_off. Raises ValueError that names one."""
        self._options = Options.read(options)
        config = model.config.get_text_config()
        self._num_draft_tokens, self._vocab_size = num_draft_tokens, int(config.vocab_size)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # a round of the fleet at a time
        self._fleet = Fleet(self._options)
        name = str(model.name_or_path)
        self._fleet.connect(name, digest_of(name, None), self._vocab_size, log)

    def __call__(self, model: Any, input_ids: Any, *, generation_config: Any, **arguments: Any) -> Any:
        """The decoding method that `generate` calls."""
        session = Session(next(self._numbers))
        generator = _Candidates(self, session, generation_config.max_length)
        try:
            return type(model)._assisted_decoding(
                _Assisted(model, generator), input_ids, generation_config=generation_config, **arguments
            )
        finally:
            with self._lock:
                self._fleet.forget([session])

    def draft(self, session: Session, token_ids: list[int], room: int) -> list[int]:
        """The draft for a text, of at most `room` tokens. Never raises."""
        session.length = len(token_ids)
        num_tokens = max(0, min(self._num_draft_tokens, room))
        ask = Ask(session, np.array(token_ids, np.int32), num_tokens)
        try:
            with self._lock:
                found = self._fleet.ask([ask]).get(session.number, Draft())
            draft = usable(
                found,
                num_tokens=num_tokens,
                vocab_size=self._vocab_size,
                min_confidence=self._options.min_confidence,
            )
            return list(draft.token_ids)
        except Exception:
            log.exception("Outrider has no draft for this step")
            return []

    def close(self) -> None:
        self._fleet.close()


class _Candidates:
    """transformers' CandidateGenerator, by its methods: importing that class would import torch."""

    requires_model_outputs = False

    def __init__(self, drafts: Drafts, session: Session, max_length: int) -> None:
        self._drafts, self._session, self._max_length = drafts, session, max_length

    def get_candidates(self, input_ids: Any, **_kwargs: Any) -> tuple[Any, None]:
        """Returns [1, length + drafted], and no logits: the model's own draws are compared with the draft."""
        length = input_ids.shape[1]
        # One token less than there is room for: the model adds one.
        draft = self._drafts.draft(self._session, input_ids[0].tolist(), self._max_length - length - 1)
        candidates = input_ids.new_empty((1, length + len(draft)))
        candidates[:, :length] = input_ids
        candidates[:, length:] = input_ids.new_tensor(draft)
        return candidates, None

    def update_candidate_strategy(self, *_args: Any, **_kwargs: Any) -> None:
        """The length of drafts is fixed; confidences cut them."""


class _Assisted:
    """A model as assisted decoding sees it, whose candidates are ours. The model itself is not changed."""

    def __init__(self, model: Any, generator: _Candidates) -> None:
        self._model, self._generator = model, generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def _get_candidate_generator(self, **_kwargs: Any) -> _Candidates:
        return self._generator
