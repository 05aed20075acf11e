"""Exact mode: whatever is proposed, the tokens are those of plain coupled decoding."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.sampling.coupling import coupled_sample
from outrider.shared.messages import Proposal
from outrider.verifier_service.acceptance import coupled
from tests.verifier_service.acceptance.toy import Prefix, path_to, through_wire

VOCAB_SIZE = 5
LENGTH = 12


def log_weights_after(model_seed: int, prefix: Prefix) -> np.ndarray:
    """An arbitrary function of the prefix; some tokens are out of the support."""
    rng = np.random.default_rng([model_seed, len(prefix), *prefix])
    weights = rng.standard_normal(VOCAB_SIZE) * 2
    weights[rng.random(VOCAB_SIZE) < 0.3] = -np.inf
    return weights if np.isfinite(weights).any() else np.zeros(VOCAB_SIZE)


@st.composite
def drafts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens, and parents (empty for a chain); siblings may even be equal."""
    tokens = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8).map(tuple))
    if draw(st.booleans()):
        return tokens, ()
    return tokens, tuple(draw(st.integers(-1, node - 1)) for node in range(len(tokens)))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 2**64 - 1), st.integers(0, 999), st.lists(drafts(), max_size=LENGTH), st.data())
def test_any_proposals(
    key: int, model_seed: int, proposed: list[tuple[tuple[int, ...], tuple[int, ...]]], data: st.DataObject
) -> None:
    plain: Prefix = ()
    while len(plain) < LENGTH + 9:
        plain += (coupled_sample(log_weights_after(model_seed, plain), key, len(plain)),)
    committed: Prefix = ()
    rounds = iter(proposed)
    while len(committed) < LENGTH:
        tokens, parents = next(rounds, ((), ()))
        if data.draw(st.booleans()):  # an oracle's chain, right up to some place
            right = data.draw(st.integers(0, 6))
            tokens, parents = (*plain[len(committed) : len(committed) + right], *tokens[:2]), ()
        proposal = through_wire(Proposal(len(committed), tokens, "any", parents=parents))
        acceptance = coupled.accept(
            lambda node, proposal=proposal, committed=committed: log_weights_after(  # type: ignore[misc]
                model_seed, committed + path_to(proposal, node)
            ),
            proposal,
            stream_key=key,
        )
        accepted = tuple(proposal.token_ids[node] for node in acceptance.accepted_nodes)
        committed += (*accepted, acceptance.final_token)
        assert committed == plain[: len(committed)]
        if not parents:
            foreseen = 0
            while foreseen < len(tokens) and tokens[foreseen] == plain[proposal.base_len + foreseen]:
                foreseen += 1
            assert len(accepted) == foreseen, "a token that was foreseen is accepted"
