"""SGLang's worker for n-grams, as far as Outrider's changes it, since SGLang is not installed with the tests.

Written after sglang/srt/speculative/ngram_worker.py of 0.5.23: what is asked of its corpus, and its tokens of the last
step that a request does not have yet where steps overlap. `Verifier` accepts a tree as SGLang does at temperature 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

VOCAB_SIZE = 100
DEPTH = 18


@dataclass(eq=False)
class Request:
    """text: what the target says, the prompt included."""

    rid: str
    text: list[int]
    prompt_len: int
    output_ids: array[int] = field(default_factory=lambda: array("q"))

    @property
    def origin_input_ids_unpadded(self) -> array[int]:
        return array("q", self.text[: self.prompt_len])


class NGRAMWorker:
    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.draft_token_num = server_args.speculative_num_draft_tokens
        self.topk = server_args.speculative_eagle_topk
        self.ngram_corpus: Any = None

    def _prepare_draft_tokens(self, batch: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        tails, lengths = [], []
        for request, new in zip(batch.reqs, batch.new_tokens, strict=True):
            text = [*request.origin_input_ids_unpadded, *request.output_ids, *new]
            tails.append(text[-DEPTH:])
            lengths.append(len(text))
        self.ngram_corpus.synchronize()
        tokens, mask = self.ngram_corpus.batch_get([request.rid for request in batch.reqs], tails, lengths)
        assert len(tokens) == len(batch.reqs) * self.draft_token_num, "SGLang's assertion"
        return tokens, mask


def server_args(**given: Any) -> Any:
    """The part of SGLang's arguments that is read."""
    defaults = {
        "speculative_num_draft_tokens": 5,
        "speculative_eagle_topk": 1,
        "speculative_num_steps": None,
        "speculative_ngram_max_trie_depth": DEPTH,
        "speculative_ngram_capacity": 10_000_000,
        "max_running_requests": None,
        "enable_mixed_chunk": True,
        "enable_dp_attention": False,
        "attention_backend": None,
        "disable_overlap_schedule": False,
        "device": "cuda",
        "page_size": None,
        "model_path": "org/big",
        "served_model_name": "big",
        "tokenizer_path": "no/such-tokenizer",
        "revision": None,
    }
    return SimpleNamespace(**{**defaults, **given})


class Verifier:
    """Steps of requests, by a target that says their texts. overlap: they have a step's tokens after the next one."""

    def __init__(self, worker: Any, overlap: bool = False) -> None:
        self.worker, self._overlap = worker, overlap
        self.num_steps = self.num_accepted = 0

    def finish(self, requests: Sequence[Request]) -> None:
        pending: dict[str, list[int]] = {}
        while running := [request for request in requests if self._length(request, pending) < len(request.text)]:
            self.step(running, pending)
        for request in requests:
            request.output_ids.extend(pending.get(request.rid, []))

    def step(self, running: Sequence[Request], pending: dict[str, list[int]]) -> None:
        new = [pending.get(request.rid, []) for request in running]
        nodes = self.worker.draft_token_num
        batch = SimpleNamespace(reqs=list(running), new_tokens=new)
        tokens, mask = self.worker._prepare_draft_tokens(batch)
        assert ((0 <= tokens) & (tokens < VOCAB_SIZE)).all(), "SGLang's embedding"
        for row, request in enumerate(running):
            request.output_ids.extend(new[row])
            said = request.text[request.prompt_len + len(request.output_ids) :]
            own_mask = mask.reshape(-1, nodes, nodes)[row]
            accepted = accepted_tokens(tokens.reshape(-1, nodes)[row], own_mask, said)
            self.num_accepted += len(accepted)
            pending[request.rid] = said[: len(accepted) + 1]
            if not self._overlap:
                request.output_ids.extend(pending.pop(request.rid))
        self.num_steps += 1

    @staticmethod
    def _length(request: Request, pending: dict[str, list[int]]) -> int:
        return request.prompt_len + len(request.output_ids) + len(pending.get(request.rid, []))


def parents_of(mask: npt.NDArray[np.bool_]) -> list[int]:
    """SGLang's rule: a node's parent is the last of its ancestors."""
    found = [np.flatnonzero(row[:node]) for node, row in enumerate(mask)]
    return [int(ancestors[-1]) if len(ancestors) else -1 for ancestors in found]


def accepted_tokens(tokens: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_], said: Sequence[int]) -> list[int]:
    """Of the path from the root that the target says."""
    parents, node, path = parents_of(mask), 0, list[int]()
    for token in said:
        children = [child for child, parent in enumerate(parents) if parent == node and tokens[child] == token]
        assert len(children) <= 1, "its probability would be counted twice"
        if not children:
            break
        node = children[0]
        path.append(token)
    return path
