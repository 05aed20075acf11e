"""Sessions of every kind of law, and rounds that agree, contradict and report at length, for chains that are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from outrider.drafting.growth.draft import Draft
from outrider.shared.messages import Proposal
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from tests.engine.sampling.law_cases import expect_equal_laws

# Tokens of "penalised" ones look back at those before them: they grow on the host.
LAWS = {
    "greedy": (SamplingParams(temperature=0.0), SpeculationMode.EXACT),
    "drawn": (SamplingParams(temperature=0.9, top_p=0.9, seed=3), SpeculationMode.EXACT),
    "penalised": (SamplingParams(temperature=0.0, frequency_penalty=0.7), SpeculationMode.EXACT),
    "rejection": (SamplingParams(temperature=0.9), SpeculationMode.REJECTION),
    "truncated": (SamplingParams(temperature=1.3, top_k=40, top_p=0.8, min_p=0.01), SpeculationMode.REJECTION),
    "penalised rejection": (SamplingParams(temperature=0.9, presence_penalty=0.5), SpeculationMode.REJECTION),
    "greedy rejection": (SamplingParams(temperature=0.0), SpeculationMode.REJECTION),
}
NUM_PLAIN = 5
# Committed since the last proposal, and tokens wanted: agreement as far as -1 goes on, contradiction, a long report.
SCRIPT: list[tuple[list[int], int]] = [([], 4), ([-1, -1, 9], 3), ([-1], 2), ([1, 2, 3, 4, 5, 6], 1)]


def prompt_at(place: int) -> list[int]:
    return list(range(3 + place, 12 + 2 * place))


def committed_after(script: Sequence[int], drafted: Sequence[int]) -> list[int]:
    """The tokens of a line of SCRIPT where `drafted` were proposed before it."""
    return [drafted[at] if token < 0 and at < len(drafted) else abs(token) for at, token in enumerate(script)]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Session ids of the drafts that take a drawn chain from now on."""
    taken: list[str] = []
    take_chain = Draft.take_chain

    def counting(self: Draft, chain) -> None:  # type: ignore[no-untyped-def]
        taken.append(self.session.spec.session_id)
        take_chain(self, chain)

    monkeypatch.setattr(Draft, "take_chain", counting)
    return taken


def expect_equal_rounds(found: Sequence[Mapping[str, Proposal]], expected: Sequence[Mapping[str, Proposal]]) -> None:
    for by_device, by_host in zip(found, expected, strict=True):
        for name, theirs in by_host.items():
            mine = by_device[name]
            assert (mine.base_len, mine.token_ids) == (theirs.base_len, theirs.token_ids), name
            assert len(mine.laws) == len(theirs.laws)
            for my_law, their_law in zip(mine.laws, theirs.laws, strict=True):
                expect_equal_laws(my_law, their_law)
            # Of races the host does not say how sure their winners are, nor recorded programs of any but laws.
            assert len(mine.confidence) in (0, len(mine.token_ids))
            if mine.confidence and theirs.confidence:
                assert list(mine.confidence) == pytest.approx(list(theirs.confidence), abs=1)
    assert any(len(proposals["drawn"].token_ids) > 3 for proposals in expected if "drawn" in proposals)
    assert any(len(proposals["rejection"].laws) > 3 for proposals in expected if "rejection" in proposals)
