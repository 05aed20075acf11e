"""Hidden states of a target with recurrent layers: transformers' own, row for row, whatever happened to the state.

Oracle: transformers' output_hidden_states over prompt and output. Its recurrence adds in another order than ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from outrider.engine.certificate import Certificate
from outrider.engine.model.loaded import LoadedModel
from outrider.shared.messages import Commit, HiddenStatesRequest, SessionSpec
from outrider.verifier_service.engine import VerifierEngine
from tests.verifier_service.drafts import drafts_for, faulty_draft
from tests.verifier_service.engine_client import (
    PARAMS,
    PROMPT,
    Draft,
    EngineShape,
    Session,
    make_spec,
    prompt_of,
    running_engine,
    tokens_of,
)

# The embedding, after a recurrent layer, after attention, and after the last norm.
LAYERS = (0, 1, 2, 3)
# Twice what transformers' two forms of the recurrence differ by on this model, and far below what rows differ by.
TOLERANCE = 1e-4


@dataclass
class Reader:
    """A drafter's view of one session: rows by position, overwritten when the verifier sends them again."""

    spec: SessionSpec
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    sent: int = -10_000

    def __post_init__(self) -> None:
        self.sent = -len(self.spec.prompt_token_ids)

    def request(self) -> HiddenStatesRequest:
        return HiddenStatesRequest(LAYERS, self.sent)

    def take(self, commit: Commit) -> None:
        piece = commit.hidden_states
        if piece is None:
            return
        data = np.frombuffer(piece.data, dtype=np.float32).reshape(len(LAYERS), piece.num_rows, piece.width)
        for place in range(piece.num_rows):
            self.rows[len(self.spec.prompt_token_ids) + piece.first_index + place] = torch.from_numpy(
                data[:, place].copy()
            )
        self.sent = piece.end


@pytest.fixture(scope="module")
def check(checkpoint: Path) -> Callable[[Reader, tuple[int, ...]], None]:
    """Every position but the last token's, which no forward has read yet."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    @torch.inference_mode()
    def check(reader: Reader, output: tuple[int, ...]) -> None:
        token_ids = (*reader.spec.prompt_token_ids, *output)
        states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        expected = torch.stack([states[layer][0] for layer in LAYERS], dim=1)[:-1]
        assert sorted(reader.rows) == list(range(len(token_ids) - 1))
        found = torch.stack([reader.rows[position] for position in sorted(reader.rows)])
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        for layer in LAYERS[1:]:  # a row more or less of the state would be seen
            assert (found[1:, layer] - expected[:-1, layer]).abs().amax(1).min() > 20 * TOLERANCE

    return check


def run(engine: VerifierEngine, reader: Reader, draft: Draft | None = None) -> list[Commit]:
    commits: list[Commit] = []
    output = reader.spec.committed_token_ids
    with Session(engine, reader.spec) as session:
        while not commits or commits[-1].finish_reason is None:
            proposal = draft(output) if draft else None
            for commit in session.step(len(output), proposal, 0 if proposal else 3, hidden=reader.request()):
                reader.take(commit)
                commits.append(commit)
                output += commit.token_ids
    return commits


@pytest.mark.parametrize("kind", ["random", "oracle", "faulty", "tree"])
@pytest.mark.parametrize("chunk", [5, 128])
def test_rows_are_of_accepted_tokens_alone(
    loaded: LoadedModel, certificate: Certificate, truth: Callable, check: Callable, kind: str, chunk: int
) -> None:
    """Then from a cached prefix, which ends where a recurrent state was kept."""
    right = tokens_of(truth("greedy", 0))
    with running_engine(loaded, certificate, EngineShape(prefill_chunk_size=chunk)) as engine:
        for hit in (0, 36):
            reader = Reader(make_spec(PROMPT, PARAMS["greedy"]))
            commits = run(engine, reader, drafts_for(right)[kind])
            assert commits[0].num_cached_tokens == hit
            assert tokens_of(commits) == right
            check(reader, right)


def test_rows_after_lost_replies(engine: VerifierEngine, truth: Callable, check: Callable) -> None:
    """Rounds are repeated with other drafts; the reader keeps what it was sent before, of tokens that come again."""
    right, order = tokens_of(truth("greedy", 0)), random.Random(4)
    draft, reader = faulty_draft(right, 5), Reader(make_spec(PROMPT, PARAMS["greedy"]))
    num_repeated = 0
    with Session(engine, reader.spec) as session:
        ends = [0]
        while ends[-1] < len(right):
            back = order.choice((0, 0, 0, 0, 0, 1, 2, 5))
            if 0 < back < len(ends):
                del ends[-back:]
                num_repeated += 1
                # As a drafter that was restarted: it asks from some row on again.
                reader.sent = min(reader.sent, ends[-1] - 1 - back)
            (commit,) = session.step(ends[-1], draft(right[: ends[-1]]), hidden=reader.request())
            reader.take(commit)
            assert commit.token_ids == right[ends[-1] : commit.end]
            ends.append(commit.end)
    assert num_repeated > 2
    check(reader, right)


def test_rows_at_another_verifier(
    loaded: LoadedModel, certificate: Certificate, truth: Callable, check: Callable
) -> None:
    """It has the tokens alone, and computes the rows of the prompt and of what is committed again."""
    right = tokens_of(truth("greedy", 0))
    with running_engine(loaded, certificate) as engine:
        for cut in (1, 13, len(right) - 1):
            reader = Reader(make_spec(PROMPT, PARAMS["greedy"], committed=right[:cut], epoch=2))
            assert tokens_of(run(engine, reader, faulty_draft(right, cut))) == right[cut:]
            check(reader, right)


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(30, 40), (200, 3)])
def test_rows_of_preempted_sessions(
    loaded: LoadedModel, certificate: Certificate, truth: Callable, check: Callable, num_blocks: int, num_slots: int
) -> None:
    """For blocks, and for slots of recurrent states."""
    right = [tokens_of(truth("greedy", seed)) for seed in range(2)]
    readers = [Reader(make_spec(prompt_of(place % 2), PARAMS["greedy"])) for place in range(5)]
    shape = EngineShape(num_blocks=num_blocks, num_slots=num_slots, prefill_chunk_size=16)
    with running_engine(loaded, certificate, shape) as engine, ThreadPoolExecutor(5) as executor:
        drafts = [faulty_draft(right[place % 2], place) for place in range(5)]
        for place, commits in enumerate(executor.map(run, [engine] * 5, readers, drafts)):
            assert tokens_of(commits) == right[place % 2]
        assert engine.rounds.scheduler.num_preemptions > 0
    for place, reader in enumerate(readers):
        check(reader, right[place % 2])
