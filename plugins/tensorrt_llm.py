"""TensorRT-LLM's user-provided drafter: drafts from Outrider's drafters, and none where none comes in time.

    drafter = outrider.tensorrt_llm.Drafter("BIG", max_draft_len=4, drafters=["host:7002"])
    LLM("BIG", speculative_config=UserProvidedDecodingConfig(max_draft_len=4, drafter=drafter),
        disable_overlap_scheduler=True)

TensorRT-LLM's sampler draws each token as it would without, and keeps a draft's as far as they are the same. It calls
`prepare_draft_tokens` before each forward pass, in its workers, to which a drafter is sent: what has threads is made
there. None of its exceptions leaves this module.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from tensorrt_llm._torch.speculative.drafter import Drafter as Base
from tensorrt_llm._utils import mpi_broadcast, mpi_rank

from outrider.plugins.named import NamedRequests, Text
from outrider.plugins.options import Options
from outrider.plugins.usable import digest_of, file_of

log = logging.getLogger(__name__)


class Drafter(Base):  # type: ignore[misc]
    """For `UserProvidedDecodingConfig(drafter=...)`."""

    # TensorRT-LLM pads drafts for CUDA graphs, and takes their tokens' cache back by the padded length.
    _needs_padding_kv_extension = True

    def __init__(
        self, model: str, *, max_draft_len: int, max_concurrency: int | None = None, vocab_size: int = 0, **options: Any
    ) -> None:
        """Raises ValueError that names a wrong option.

        model: the target's folder or Hub id. max_concurrency: most requests that are drafted for at once; None: any
        number. vocab_size: 0: as its config says. options: options.Options, but auto_off.
        """
        super().__init__(
            max_draft_len=max_draft_len, max_total_draft_tokens=max_draft_len, max_concurrency=max_concurrency
        )
        self._options = Options.read(options)
        self._model, self._vocab_size = model, vocab_size or _vocab_size(model)

    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        """Sets the draft of each request that decodes, of 0 to max_draft_len tokens."""
        requests = list(scheduled_requests.generation_requests)
        drafts = self._ask(requests) if mpi_rank() == 0 else {}
        drafts = mpi_broadcast(drafts, root=0)  # ranks that disagree would wait for each other for ever
        for request in requests:
            request.py_draft_tokens = drafts.get(request.py_request_id, [])

    def close(self) -> None:
        self._drafts.close()

    def _ask(self, requests: Sequence[Any]) -> dict[int, list[int]]:
        drafts = self._drafts.drafts(self._text(request) for request in requests)
        found = zip(requests, drafts, strict=bool(drafts))  # none at all on an error
        return {request.py_request_id: list(draft.token_ids) for request, draft in found}

    def _text(self, request: Any) -> Text:
        token_ids = np.array(request.get_tokens(0), np.int32)
        # One token less than there is room for: the target adds one.
        room = request.py_orig_prompt_len + request.py_max_new_tokens - len(token_ids) - 1
        return Text(request.py_request_id, token_ids, min(self.max_total_draft_tokens, room))

    @cached_property
    def _drafts(self) -> NamedRequests:
        drafts = NamedRequests(self._options, self._vocab_size, log)
        drafts.fleet.connect(self._model, digest_of(self._model, None), self._vocab_size, log)
        return drafts


def _vocab_size(model: str) -> int:
    """Raises ValueError where the config is not on this machine, or does not say."""
    file = file_of(model, "config.json")
    config = {} if file is None else json.loads(file.read_text())
    found = config.get("text_config", config).get("vocab_size")
    if not found:
        raise ValueError(f"{model}: no config.json with a vocab_size is on this machine; give vocab_size")
    return int(found)
