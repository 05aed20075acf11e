"""SGLang's speculative algorithm OUTRIDER: trees from Outrider's drafters in the place of its n-grams.

    OUTRIDER_OPTIONS='{"drafters": ["host:7002"]}' python -m sglang.launch_server --model-path BIG \\
        --speculative-algorithm OUTRIDER --speculative-num-draft-tokens 5

SGLang's NGRAMWorker verifies the trees that it looks up in a corpus; here the drafters are the corpus. SGLang decides
every token. It takes the same number of nodes for each request: what a draft lacks is filled up. An exception would end
its scheduler: none leaves this module after the start.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.plugins.named import NamedRequests, Text
from outrider.plugins.options import Options
from outrider.plugins.usable import Draft, digest_of

log = logging.getLogger("sglang.srt.outrider")  # SGLang's own handlers print it

OPTIONS_VARIABLE = "OUTRIDER_OPTIONS"
# nodes of a tree with its root, and branches of a node, where SGLang is told none
_NUM_NODES, _NUM_BRANCHES = 5, 1
# requests; SGLang's own bound for speculation
_MAX_REQUESTS = 48
# nodes; of SGLang's corpus, which its worker allocates (10 million) and nobody fills
_CORPUS_CAPACITY = 1024


def register() -> None:
    """The entry point of SGLang's group `sglang.srt.plugins`."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    def make_worker(_server_args: Any) -> type:
        from sglang.srt.runtime_context import get_parallel
        from sglang.srt.speculative.ngram_worker import NGRAMWorker

        return worker_class(NGRAMWorker, lambda: get_parallel().tp_group)

    algorithm = algorithm_class(CustomSpecAlgo, SpeculativeAlgorithm.NGRAM)
    SpeculativeAlgorithm.register(
        "OUTRIDER", supports_overlap=True, validate_server_args=validate, spec_class=algorithm
    )(make_worker)


def validate(server_args: Any) -> None:
    """Raises ValueError that names a wrong option: SGLang does not start with it."""
    read_options()
    if (server_args.speculative_num_draft_tokens or _NUM_NODES) < 2:
        raise ValueError("--speculative-num-draft-tokens counts the last token too: 2 or more")
    is_tree = (server_args.speculative_eagle_topk or _NUM_BRANCHES) > 1
    if is_tree and (server_args.page_size or 1) > 1 and server_args.attention_backend != "flashinfer":
        raise ValueError("--speculative-eagle-topk above 1 needs --page-size 1 or --attention-backend flashinfer")
    if server_args.enable_dp_attention:
        raise ValueError("speculation by NGRAM's worker does not support --enable-dp-attention")


def read_options() -> Options:
    try:
        return Options.read(json.loads(os.environ.get(OPTIONS_VARIABLE, "null")))
    except json.JSONDecodeError as error:
        raise ValueError(f"{OPTIONS_VARIABLE} is not JSON: {error}") from error


def algorithm_class(base: type, ngram: Any) -> type:
    """base: SGLang's CustomSpecAlgo. ngram: its own algorithm NGRAM, as which all of SGLang but the corpus works."""

    class Algorithm(base):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            """What the scheduler asks, and CustomSpecAlgo of SGLang 0.5.23 lacks, as `create_future_map`."""
            return getattr(ngram, name)

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            """As SGLang does for NGRAM."""
            server_args.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens or _NUM_NODES
            server_args.speculative_eagle_topk = server_args.speculative_eagle_topk or _NUM_BRANCHES
            server_args.speculative_num_steps = server_args.speculative_num_draft_tokens // (
                server_args.speculative_eagle_topk
            )
            # A step's tokens are the end of what is looked up.
            server_args.speculative_ngram_max_trie_depth = max(
                server_args.speculative_ngram_max_trie_depth, server_args.speculative_num_draft_tokens
            )
            server_args.speculative_ngram_capacity = _CORPUS_CAPACITY
            server_args.max_running_requests = server_args.max_running_requests or _MAX_REQUESTS
            server_args.enable_mixed_chunk = False
            if server_args.device == "cpu":
                server_args.disable_overlap_schedule = True

    return Algorithm


def worker_class(base: type, tp_group: Callable[[], Any]) -> type:
    """base: SGLang's NGRAMWorker. tp_group: its ranks, which must all have the same drafts."""

    class Worker(base):  # type: ignore[misc]
        def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
            vocab_size = int(target_worker.model_config.vocab_size)
            self.ngram_corpus = Corpus(server_args, vocab_size, self.draft_token_num, self.topk, tp_group())

        def _prepare_draft_tokens(self, batch: Any) -> Any:
            self.ngram_corpus.requests = batch.reqs
            return super()._prepare_draft_tokens(batch)

    return Worker


class Corpus:
    """SGLang's NgramCorpus, as far as its worker uses it."""

    def __init__(self, server_args: Any, vocab_size: int, num_nodes: int, max_branches: int, ranks: Any) -> None:
        self.requests: Sequence[Any] = ()  # of the batch that is looked up next
        self._num_nodes, self._ranks = num_nodes, ranks
        self._drafts = NamedRequests(read_options(), vocab_size, log, max_branches)
        if ranks.rank_in_group == 0:
            tokenizer = str(server_args.tokenizer_path or server_args.model_path)
            name = str(server_args.served_model_name or server_args.model_path)
            self._drafts.fleet.connect(name, digest_of(tokenizer, server_args.revision), vocab_size, log)

    def batch_get(
        self, request_ids: Sequence[str], tails: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Returns the nodes' tokens [requests * nodes], the root first, and their ancestors [requests * nodes * nodes].

        tails: the end of each text, with the tokens that its request has not yet. lengths: of the whole texts.
        """
        drafts: list[Draft] = []
        if self._ranks.rank_in_group == 0:
            rows = zip(request_ids, self.requests, tails, lengths, strict=True)
            texts = (
                Text(name, _whole(request, tail, length), self._num_nodes - 1) for name, request, tail, length in rows
            )
            drafts = self._drafts.drafts(texts)
        if self._ranks.world_size > 1:
            drafts = self._ranks.broadcast_object(drafts, src=0)
        drafts = drafts or [Draft() for _ in tails]
        trees = [tree(tail[-1], draft, self._num_nodes) for tail, draft in zip(tails, drafts, strict=True)]
        return np.concatenate([tokens for tokens, _ in trees]), np.concatenate([mask.ravel() for _, mask in trees])

    def batch_put(self, _texts: Any) -> None:
        """Drafters are told with the next question."""

    def synchronize(self) -> None:
        """Nothing is written in the background."""

    def erase_match_state(self, request_ids: Sequence[str]) -> None:
        self._drafts.forget(request_ids)

    def reset(self) -> None:
        """SGLang's cache was flushed; drafters have the requests' own texts alone."""

    def close(self) -> None:
        self._drafts.close()


def tree(root: int, draft: Draft, num_nodes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Returns a draft's tokens [nodes] with its root, and each node's ancestors, itself included [nodes, nodes].

    What is missing goes on below the last node. SGLang's own padding makes siblings with one token, whose probability
    is then counted for each.
    """
    token_ids, parents = [root, *draft.token_ids], [-1, *(parent + 1 for parent in draft.parents)]
    for node in range(len(token_ids), num_nodes):
        token_ids.append(token_ids[-1])
        parents.append(node - 1)
    mask = np.eye(num_nodes, dtype=np.bool_)
    for node, parent in enumerate(parents[1:], 1):
        mask[node] |= mask[parent]
    return np.array(token_ids, np.int64), mask


def _whole(request: Any, tail: Sequence[int], length: int) -> npt.NDArray[np.int64]:
    """A request's text. With overlapping steps the tokens of the last one are in the tail alone."""
    parts = [np.asarray(part, np.int64) for part in (request.origin_input_ids_unpadded, request.output_ids)]
    num_new = length - sum(map(len, parts))
    return np.concatenate([*parts, np.asarray(tail[len(tail) - num_new :], np.int64)])
