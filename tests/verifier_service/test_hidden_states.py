"""Hidden states that come with commits are those of transformers, row for row, however the rows came to be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from outrider.engine.attention.hidden_store import HiddenStateStore
from outrider.engine.certificate import Certificate
from outrider.engine.model.loaded import LoadedModel
from outrider.shared.errors import InvalidRequest
from outrider.shared.messages import Commit, HiddenStates, HiddenStatesRequest
from outrider.verifier_service import hidden_states as sender
from outrider.verifier_service.engine import VerifierEngine
from tests.verifier_service.drafts import drafts_for
from tests.verifier_service.engine_client import (
    PARAMS,
    PROMPT,
    EngineShape,
    Session,
    generate,
    make_spec,
    running_engine,
    tokens_of,
)

LAYERS = (1, 2)
NUM_STEPS = 12


def rows_of(hidden: HiddenStates) -> torch.Tensor:
    """[layers, num_rows, width]"""
    shape = (len(hidden.layers), hidden.num_rows, hidden.width)
    return torch.from_numpy(np.frombuffer(hidden.data, dtype=np.float32).reshape(shape).copy())


def gather(commits: list[Commit], first_index: int) -> torch.Tensor:
    """All rows that came with the commits, which must join up from `first_index` on."""
    pieces = [commit.hidden_states for commit in commits if commit.hidden_states is not None]
    assert pieces, "no hidden states came"
    for piece in pieces:
        assert piece.first_index == first_index
        assert piece.layers == LAYERS
        first_index = piece.end
    return torch.cat([rows_of(piece) for piece in pieces], dim=1)


@pytest.fixture
def expected(checkpoint: Path) -> Callable[[tuple[int, ...]], torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    @torch.inference_mode()
    def run(token_ids: tuple[int, ...]) -> torch.Tensor:
        states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        return torch.stack([states[layer][0] for layer in LAYERS])

    return run


def decode(engine: VerifierEngine, kind: str, truth: tuple[int, ...], first_index: int) -> list[Commit]:
    draft = drafts_for(truth).get(kind)
    commits: list[Commit] = []
    output: tuple[int, ...] = ()
    with Session(engine, make_spec(PROMPT, PARAMS["greedy"])) as session:
        sent = first_index
        for _ in range(NUM_STEPS):
            proposal = draft(output) if draft else None
            request = HiddenStatesRequest(LAYERS, sent)
            for commit in session.step(len(output), proposal, 0 if proposal else 3, hidden=request):
                commits.append(commit)
                output += commit.token_ids
                if commit.hidden_states is not None:
                    sent = commit.hidden_states.end
            if commits[-1].finish_reason is not None:
                break
    return commits


@pytest.mark.parametrize("kind", ["none", "random", "oracle", "faulty", "tree"])
@pytest.mark.parametrize("chunk", [5, 128])
def test_every_committed_row_comes_once(
    loaded: LoadedModel, certificate: Certificate, truth, expected, kind: str, chunk: int
) -> None:
    right = tokens_of(truth("greedy", 0))
    with running_engine(loaded, certificate, EngineShape(prefill_chunk_size=chunk)) as engine:
        commits = decode(engine, kind, right, -len(PROMPT))
    output = tokens_of(commits)
    assert output == right[: len(output)]
    rows = gather(commits, -len(PROMPT))
    # The last committed token has not been through the model yet.
    assert rows.shape[1] == len(PROMPT) + len(output) - 1
    torch.testing.assert_close(rows, expected(PROMPT + output)[:, : rows.shape[1]], atol=2e-5, rtol=0)


def test_a_cached_prefix_still_has_its_rows(engine: VerifierEngine, truth, expected) -> None:
    right = tokens_of(truth("greedy", 0))
    decode(engine, "none", right, -len(PROMPT))
    again = decode(engine, "oracle", right, -len(PROMPT))
    assert again[0].num_cached_tokens > 0
    rows = gather(again, -len(PROMPT))
    torch.testing.assert_close(rows, expected(PROMPT + tokens_of(again))[:, : rows.shape[1]], atol=2e-5, rtol=0)


def test_rows_computed_before_anybody_wanted_them_are_left_out(engine: VerifierEngine, truth) -> None:
    right = tokens_of(truth("greedy", 0))
    generate(engine, make_spec(PROMPT, PARAMS["greedy"]))
    commits = decode(engine, "oracle", right, -len(PROMPT))
    num_cached = commits[0].num_cached_tokens
    assert num_cached > 0
    first = commits[0].hidden_states
    assert first is not None
    assert first.first_index >= num_cached - len(PROMPT) > -len(PROMPT)


def test_a_late_drafter_gets_what_was_computed_long_ago(engine: VerifierEngine, truth, expected) -> None:
    output: tuple[int, ...] = ()
    with Session(engine, make_spec(PROMPT, PARAMS["greedy"])) as session:
        # Somebody else keeps the layers, this session's drafter is not there yet.
        with Session(engine, make_spec(PROMPT[:5], PARAMS["greedy"], cache_salt="other")) as other:
            other.step(0, hidden=HiddenStatesRequest(LAYERS, -5))
        for _ in range(4):
            for commit in session.step(len(output), max_new_tokens=2):
                assert commit.hidden_states is None
                output += commit.token_ids
        late = session.step(len(output), hidden=HiddenStatesRequest(LAYERS, -len(PROMPT)))
    output += tokens_of(late)
    rows = gather(late, -len(PROMPT))
    torch.testing.assert_close(rows, expected(PROMPT + output)[:, : rows.shape[1]], atol=2e-5, rtol=0)
    assert rows.shape[1] == len(PROMPT) + len(output) - 1


def test_a_long_piece_comes_in_parts(engine: VerifierEngine, truth, expected, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_per_part = 7
    monkeypatch.setattr(sender.rows_to_send, "__kwdefaults__", {"max_bytes": rows_per_part * len(LAYERS) * 64 * 4 + 5})
    right = tokens_of(truth("greedy", 0))
    commits = decode(engine, "none", right, -len(PROMPT))
    pieces = [commit.hidden_states for commit in commits if commit.hidden_states is not None]
    assert all(piece.num_rows <= rows_per_part for piece in pieces)
    assert len(pieces) > len(PROMPT) // rows_per_part
    rows = gather(commits, -len(PROMPT))
    torch.testing.assert_close(rows, expected(PROMPT + tokens_of(commits))[:, : rows.shape[1]], atol=2e-5, rtol=0)


def test_a_layer_that_is_not_there_is_refused(engine: VerifierEngine) -> None:
    with (
        Session(engine, make_spec(PROMPT, PARAMS["greedy"])) as session,
        pytest.raises(InvalidRequest, match="layer 3 requested, this model has 0 to 2"),
    ):
        session.step(0, hidden=HiddenStatesRequest((3,), 0))


def test_the_store_knows_what_has_been_written() -> None:
    store = HiddenStateStore(num_slots=6, width=2, dtype=torch.float32, device="cpu")
    store.keep([4])
    store.write({4: torch.arange(6.0).view(3, 2)}, torch.tensor([5, 1, 2]))
    assert store.num_missing([4], [5, 1, 2]) == 0
    assert store.num_missing([4], [5, 0, 2]) == 2
    assert store.num_missing([4], [3]) == 1
    store.move(torch.tensor([1, 2]), torch.tensor([2, 0]))
    assert store.num_missing([4], [0, 2]) == 0
    assert store.read([4], [2, 0]).tolist() == [[2.0, 3.0], [4.0, 5.0]]
    store.keep([4, 7])
    assert store.num_missing([4, 7], [5]) == 1
