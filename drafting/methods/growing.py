"""The draft method over any `DraftNet`: all sessions' proposals grow together, with one forward per depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.drafting.growth.draft import BEAM_WIDTH, MAX_BRANCHES, Draft
from outrider.drafting.methods.net import DraftNet
from outrider.drafting.session import DraftSession
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.engine.sampling.laws import LogitsProcessor
from outrider.shared.messages import DraftMethodInfo, Proposal

# nodes; largest tree; more would not fit the verifier's row budget with other sessions in the batch
MAX_TREE_NODES = 64


class GrowingMethod:
    """Implements drafting.methods.interface.DraftMethod: chains, and trees where the step asks for one."""

    def __init__(
        self,
        net: DraftNet,
        info: DraftMethodInfo,
        *,
        eos_token_ids: Sequence[int],
        grammars: GrammarCompiler,
        draw_chains: Callable[[Sequence[Draft]], None] | None = None,
        beam_width: int = BEAM_WIDTH,
    ) -> None:
        """Takes the net.

        draw_chains: draws whole plain chains where the logits are; `grow` draws all others. beam_width: nodes of a tree
        that are expanded per depth; MAX_TREE_NODES where further nodes take no forward: the tree is then the best one.
        """
        self.info = info
        self._net = net
        self._eos_token_ids = tuple(eos_token_ids)
        self.grammars: GrammarCompiler | None = grammars
        self._draw_chains = draw_chains
        self._beam_width = beam_width
        self._processors: dict[int, LogitsProcessor] = {}

    def open(self, session: DraftSession) -> None:
        params = session.spec.sampling_params
        grammar = session.grammar
        if grammar is None and params.grammar and self.grammars is not None:
            grammar = self.grammars.compile(params.grammar)
        prompt_token_ids = session.spec.prompt_token_ids
        self._processors[id(session)] = LogitsProcessor(params, prompt_token_ids, self._eos_token_ids, grammar)
        self._net.open(session)

    def advance(self, session: DraftSession) -> bool:
        return self._net.advance(session)

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        drafts = [self._begin(session) for session in sessions]
        if self._draw_chains is not None:
            self._draw_chains([draft for draft in drafts if draft.frontier and draft.is_plain_chain])
        while running := [draft for draft in drafts if draft.frontier]:
            for draft, logits in zip(running, self._net.logits(running), strict=True):
                if draft.frontier:
                    draft.grow(logits)
        return [draft.finish(self.info.name) for draft in drafts]

    def close(self, session: DraftSession) -> None:
        self._processors.pop(id(session), None)
        self._net.close(session)

    def _begin(self, session: DraftSession) -> Draft:
        step = session.step
        num_tokens = min(step.num_draft_tokens, self.info.max_num_draft_tokens) if step is not None else 0
        max_nodes, max_branches = num_tokens, 1
        if step is not None and step.max_tree_nodes > 1:
            max_nodes, max_branches = min(step.max_tree_nodes, MAX_TREE_NODES), step.max_branches or MAX_BRANCHES
        depth = self._depth(session, num_tokens)
        return Draft(session, self._processors[id(session)], max_nodes, depth, max_branches, self._beam_width)

    def _depth(self, session: DraftSession, num_tokens: int) -> int:
        longest = self.info.max_model_len or len(session.token_ids) + num_tokens
        return min(num_tokens, self.info.max_num_draft_tokens, longest - len(session.token_ids))
