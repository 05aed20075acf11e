"""vLLM's `custom_class` proposer: drafts from Outrider's drafters, and no draft where none comes in time.

    vllm serve BIG --speculative-config '{"model": "outrider.vllm.Proposer", "num_speculative_tokens": 4}' \
        --additional-config '{"outrider": {"drafters": ["host:7002"]}}'

vLLM's sampler decides every token, whatever is drafted. It calls `propose` in each step between sampling and output. An
exception, a draft that is too long or an id outside the vocabulary would end its engine: none leaves this module.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from outrider.plugins.fleet import Ask, Fleet
from outrider.plugins.options import Options
from outrider.plugins.rows import Rows, Session
from outrider.plugins.switch import Switch
from outrider.plugins.usable import Draft, digest_of, usable

log = logging.getLogger("vllm.outrider")  # vLLM's own handlers print it

# seconds; a session without a row for so long has ended, and the time between two looks for such
_UNSEEN_S, _SWEEP_S = 10.0, 1.0


class Proposer:
    def __init__(self, vllm_config: Any) -> None:
        """Raises ValueError that names a wrong option: vLLM does not start with it."""
        extra = vllm_config.additional_config
        self._options = Options.read(extra.get("outrider") if isinstance(extra, dict) else None)
        model = vllm_config.model_config
        self._num_draft_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self._vocab_size = int(model.get_vocab_size())
        self._max_model_len = int(model.max_model_len)
        self._rows, self._switch = Rows(), Switch()
        self._lock = threading.Lock()  # of the rows, which are swept while vLLM is idle
        self._last: tuple[float, frozenset[int]] = (0.0, frozenset())
        self._fleet = Fleet(self._options)
        self._closed = threading.Event()
        if _is_asking_rank():
            name = str(model.served_model_name or model.model)
            digest = digest_of(str(model.tokenizer), model.tokenizer_revision)
            self._fleet.connect(name, digest, self._vocab_size, log)
            threading.Thread(target=self._sweep, name="outrider-sweep", daemon=True).start()

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """vLLM's CPU worker calls it; the weights are at the drafters."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Returns a draft for each row, of 0 to num_speculative_tokens ids.

        sampled_token_ids: those of this step; none for a part of a prompt. num_tokens_no_spec [rows]: length of each
        text, they included. token_ids_cpu [rows, max_model_len].
        """
        try:
            if self._fleet.links and sampled_token_ids:
                return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception:
            log.exception("Outrider has no drafts for this step")
        return [[] for _ in sampled_token_ids]

    def close(self) -> None:
        self._closed.set()
        self._fleet.close()

    def _propose(self, sampled: Sequence[Sequence[int]], num_tokens: Any, token_ids: Any) -> list[list[int]]:
        with self._lock:
            sessions = self._rows.match(sampled, num_tokens, token_ids)
        self._observe(sessions, sampled)
        if self._options.auto_off and not self._switch.wants(len(sessions)):
            return [[] for _ in sessions]
        asks = []
        for row, session in enumerate(sessions):
            room = self._max_model_len - session.length - 1
            asks.append(Ask(session, token_ids[row], max(0, min(self._num_draft_tokens, room)) if sampled[row] else 0))
        drafts = self._fleet.ask(asks)
        return [self._usable(drafts.get(session.number, Draft())) for session in sessions]

    def _observe(self, sessions: Sequence[Session], sampled: Sequence[Sequence[int]]) -> None:
        """Steps that read prompts, begin or end requests are not compared: most of their time is not decoding."""
        now, numbers = time.perf_counter(), frozenset(session.number for session in sessions)
        (before, numbers_before), self._last = self._last, (now, numbers)
        if numbers != numbers_before or not all(sampled):
            return
        pays = self._switch.observe(len(sessions), sum(map(len, sampled)), now - before)
        if pays is not None and self._options.auto_off:
            state = "on" if pays else "off: they do not pay"
            log.info("Outrider's drafts for batches of about %d are %s", len(sessions), state)

    def _usable(self, draft: Draft) -> list[int]:
        found = usable(
            draft,
            num_tokens=self._num_draft_tokens,
            vocab_size=self._vocab_size,
            min_confidence=self._options.min_confidence,
        )
        return list(found.token_ids)

    def _sweep(self) -> None:
        while not self._closed.wait(_SWEEP_S):
            try:
                with self._lock:
                    old = self._rows.forget_unseen(_UNSEEN_S)
                self._fleet.forget(old)
            except Exception:
                log.exception("Outrider cannot close sessions")


def _is_asking_rank() -> bool:
    """With tensor parallelism every rank proposes, and vLLM takes the drafts of the first one of the last stage."""
    parallel_state = sys.modules.get("vllm.distributed.parallel_state")
    if parallel_state is None:
        return True
    try:
        return bool(parallel_state.get_tp_group().rank_in_group == 0)
    except AssertionError:  # no groups: one rank
        return True
