"""A lookup in front of another method: the surer one drafts, what it learns from, trees, grammars, and withdrawals.

The other method is the n-gram lookup of one token: it is often right where a single token decides, and wrong elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.ngram import NgramMethod
from outrider.drafting.methods.suffix import SuffixMethod, SuffixSettings
from outrider.drafting.serving.combined import CombinedMethod, with_lookups
from outrider.drafting.session import DraftSession
from outrider.shared.messages import DraftStep, Proposal, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode

SPEC = SessionSpec("s", 1, (7, 8, 9, 7, 8), (), SamplingParams(), SpeculationMode.REJECTION, 0, method="ngram+suffix")
LENGTH = 3


def suffix() -> SuffixMethod:
    return SuffixMethod(SuffixSettings(24, 100, 100_000, 4.0, 0.0))


def one_token() -> NgramMethod:
    return NgramMethod(prompt_lookup_min=1, prompt_lookup_max=1)


def tokens_a_round(method: DraftMethod, text: Sequence[int]) -> float:
    """Of a verifier that says `text`, whatever is drafted."""
    session = DraftSession(SPEC, list(SPEC.prompt_token_ids), lambda _reply: None)
    method.open(session)
    length = num_rounds = 0
    new: list[int] = []
    while length < len(text):
        session.report(DraftStep(1, length - len(new), tuple(new), LENGTH))
        (proposal,) = method.propose([session])
        assert proposal.base_len == length
        num_right = next(
            (n for n, pair in enumerate(zip(proposal.token_ids, text[length:], strict=False)) if pair[0] != pair[1]),
            min(len(proposal.token_ids), len(text) - length),
        )
        new = list(text[length : length + num_right + 1])
        length += len(new)
        num_rounds += 1
    method.close(session)
    return len(text) / num_rounds


def sentences(seed: int, count: int) -> list[int]:
    """The same sentence of forty tokens, in which tokens recur: only a long match knows what follows."""
    rng = random.Random(seed)
    sentence = [rng.randrange(6) for _ in range(40)]
    return sentence * count


def misleading(seed: int, count: int) -> list[int]:
    """What a long match promises never comes, and the last token alone decides: n, 100 + n, n + 1, 200 + n, ..."""
    rng = random.Random(seed)
    text: list[int] = []
    for _ in range(count):
        start = rng.randrange(50)
        text += [start, 100 + start, 200 + start, 300 + start, 400 + start]
    return text


def test_it_is_as_good_as_the_better_of_the_two() -> None:
    for text in (sentences(1, 12), misleading(1, 120), [*misleading(2, 60), *sentences(2, 8), *misleading(3, 60)]):
        alone = [tokens_a_round(method, text) for method in (suffix(), one_token())]
        both = tokens_a_round(CombinedMethod(one_token(), suffix()), text)
        assert both >= 0.97 * max(alone)


def test_a_lookup_that_keeps_failing_is_left_to_the_method() -> None:
    """Each pair of tokens has occurred, with another one behind it; the last token knows what comes."""
    rng = random.Random(0)
    pairs = [(rng.randrange(20), rng.randrange(20)) for _ in range(400)]
    text = [token for number, (first, second) in enumerate(pairs) for token in (first, second, 1000 + number)]
    asked: list[int] = []

    class Watched(NgramMethod):
        def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
            asked.append(len(sessions))
            return super().propose(sessions)

    method = CombinedMethod(Watched(prompt_lookup_min=1, prompt_lookup_max=1), suffix())
    tokens_a_round(method, text)
    assert sum(asked[-50:]) > 0


def test_names_limits_trees_and_what_comes_with_what() -> None:
    methods: dict[str, DraftMethod] = {"suffix": suffix(), "ngram": one_token()}
    assert set(with_lookups(methods)) == {"suffix", "ngram"}  # nothing to gain from two lookups
    assert set(with_lookups({"eagle3": one_token()})) == {"eagle3"}
    served = with_lookups({"eagle3": one_token(), **methods})
    assert set(served) == {"suffix", "ngram", "eagle3", "eagle3+suffix"}
    info = served["eagle3+suffix"].info
    assert info == replace(one_token().info, name="ngram+suffix")


def test_both_see_tokens_that_were_withdrawn() -> None:
    method = CombinedMethod(one_token(), suffix())
    session = DraftSession(SPEC, list(SPEC.prompt_token_ids), lambda _reply: None)
    method.open(session)
    for base_len, tokens in ((0, ()), (0, (9, 7, 8)), (1, (20, 21, 22)), (2, (9, 7, 8, 9))):
        session.report(DraftStep(1, base_len, tuple(tokens), LENGTH))
        (proposal,) = method.propose([session])
        assert proposal.base_len == session.committed_len
    fresh = CombinedMethod(one_token(), suffix())
    again = DraftSession(SPEC, list(session.token_ids), lambda _reply: None)
    fresh.open(again)
    again.report(DraftStep(1, session.committed_len, (), LENGTH))
    assert fresh.propose([again])[0].token_ids == proposal.token_ids
    method.close(session)
