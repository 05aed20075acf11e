"""Proposals of every quality for tests: none of them may change what exact mode emits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from outrider.shared.messages import Commit, Proposal
from outrider.verifier_service.engine import VerifierEngine
from tests.verifier_service.engine_client import (
    PARAMS,
    PROMPT,
    VOCAB_SIZE,
    Draft,
    finish_of,
    generate,
    logprobs_of,
    make_spec,
    tokens_of,
)


def random_draft(seed: int, longest: int = 6) -> Draft:
    rng = random.Random(seed)

    def draft(output: tuple[int, ...]) -> Proposal:
        tokens = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest)))
        return Proposal(len(output), tokens, "random")

    return draft


def oracle_draft(truth: Sequence[int], num_draft_tokens: int = 4) -> Draft:
    """Always right."""

    def draft(output: tuple[int, ...]) -> Proposal | None:
        tokens = tuple(truth[len(output) : len(output) + num_draft_tokens])
        return Proposal(len(output), tokens, "oracle") if tokens else None

    return draft


def faulty_draft(truth: Sequence[int], seed: int) -> Draft:
    """Right up to a random place, sometimes nothing at all."""
    rng = random.Random(seed)

    def draft(output: tuple[int, ...]) -> Proposal | None:
        if rng.random() < 0.2:
            return None
        tokens = [
            token if rng.random() < 0.75 else rng.randrange(VOCAB_SIZE)
            for token in truth[len(output) : len(output) + rng.randint(1, 7)]
        ]
        return Proposal(len(output), tuple(tokens), "faulty") if tokens else None

    return draft


def late_draft(truth: Sequence[int], seed: int) -> Draft:
    """Made for an earlier index: its beginning has been committed meanwhile."""
    rng = random.Random(seed)

    def draft(output: tuple[int, ...]) -> Proposal | None:
        base_len = max(0, len(output) - rng.randint(0, 3))
        tokens = tuple(truth[base_len : base_len + 6])
        return Proposal(base_len, tokens, "late") if tokens else None

    return draft


def tree_draft(truth: Sequence[int], seed: int) -> Draft:
    """The truth as one path, at random places among wrong siblings and wrong subtrees."""
    rng = random.Random(seed)

    def draft(output: tuple[int, ...]) -> Proposal:
        tokens: list[int] = []
        parents: list[int] = []
        on_path, depth = -1, 0
        for _ in range(rng.randint(1, 10)):
            if rng.random() < 0.5 and len(output) + depth < len(truth):
                tokens.append(truth[len(output) + depth])
                parents.append(on_path)
                on_path, depth = len(tokens) - 1, depth + 1
            else:
                parents.append(rng.randint(-1, len(tokens) - 1))
                tokens.append(rng.randrange(VOCAB_SIZE))
        return Proposal(len(output), tuple(tokens), "tree", parents=tuple(parents))

    return draft


def drafts_for(right: tuple[int, ...]) -> dict[str, Draft]:
    return {
        "random": random_draft(1),
        "oracle": oracle_draft(right),
        "long oracle": oracle_draft(right, 9),
        "faulty": faulty_draft(right, 2),
        "late": late_draft(right, 3),
        "tree": tree_draft(right, 4),
    }


def generated_alike(engine: VerifierEngine, truth: Callable, kind: str, name: str) -> list[Commit]:
    """The commits with drafts of this kind: asserted to say what plain decoding says."""
    expected = truth(name, 0)
    right = tokens_of(expected)
    commits = generate(engine, make_spec(PROMPT, PARAMS[name]), drafts_for(right)[kind])
    assert tokens_of(commits) == right
    assert finish_of(commits) == finish_of(expected)
    assert logprobs_of(commits) == logprobs_of(expected)
    accepted = sum(commit.num_accepted_tokens for commit in commits)
    assert (accepted > len(right) // 4) == (kind != "random")
    return commits
