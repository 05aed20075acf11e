"""Lookup drafts under a grammar: what the lookup finds, as far as the grammar allows it, and what the grammar forces.

A forced tool call is mostly known in advance: its markers, names and keys. Where the lookup has nothing, the grammar's
only continuation is drafted, and the lookup runs again after it. The lookup goes first: of several spellings of a
forced text it knows the one that the model writes. On forced calls of SmolLM2 135M, five tokens a draft, that brings
2.5 instead of 1.7 tokens per round; the grammar first, 2.2 (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from outrider.shared.errors import InvalidRequest

if TYPE_CHECKING:
    from outrider.engine.sampling.grammar import GrammarState

# Maps (tokens after the committed ones, number of tokens) -> what the lookup proposes after both; may be shorter.
LookUp = Callable[[list[int], int], list[int]]


def guided_chain(grammar: GrammarState, output_token_ids: list[int], num_tokens: int, look_up: LookUp) -> list[int]:
    """Returns at most `num_tokens` tokens, each of which the grammar allows. Depends on the arguments alone."""
    draft: list[int] = []
    found = look_up(draft, num_tokens)
    try:
        while len(draft) < num_tokens:
            path = [*output_token_ids, *draft]
            if found and grammar.allowed(path)[found[0]]:
                draft.append(found.pop(0))
                continue
            forced = grammar.forced(path)
            if forced is None:
                break
            draft.append(forced)
            found = look_up(draft, num_tokens - len(draft))
    except InvalidRequest:
        pass  # the grammar is beyond its limits: the verifier ends the request with the reason
    return draft
