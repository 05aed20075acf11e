"""What a learner is given of served sessions: the target's own rows, bounded, none of the private ones."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers

from outrider.engine.certificate import Certificate
from outrider.engine.model.loaded import LoadedModel
from outrider.shared.messages import SessionSpec
from outrider.shared.request_params import Speculation
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.learning.places import SaltPlaces
from outrider.verifier_service.learning.tap import Tap, TappedWindow, is_held_back, may_learn_from
from tests.verifier_service.engine_client import PROMPT, generate, make_spec, prompt_of, running_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LAYERS = (1, 2)  # the second is the final norm's output: the model has two layers


@dataclass
class Tapped:
    engine: VerifierEngine
    tap: Tap
    counts: Counter[str]

    def serve(self, spec: SessionSpec) -> list[TappedWindow]:
        generate(self.engine, spec, free_run=64)
        self.engine.between_rounds(lambda: None)  # the session is closed by a command before this one
        return [self.tap.windows.get_nowait() for _ in range(self.tap.windows.qsize())]


@pytest.fixture
def tapped(loaded: LoadedModel, certificate: Certificate) -> Iterator[Tapped]:
    counts: Counter[str] = Counter()
    with running_engine(loaded, certificate) as engine:
        tap = Tap(LAYERS, engine.rounds.read_rows, lambda name, number: counts.update({name: number}))
        engine.when_sessions_end(tap.take, LAYERS)
        yield Tapped(engine, tap, counts)


def test_a_window_has_the_sessions_tokens_and_transformers_rows(tapped: Tapped, checkpoint: Path) -> None:
    [window] = tapped.serve(make_spec(PROMPT, GREEDY))
    assert window.token_ids[: len(PROMPT)] == PROMPT
    assert window.first_counted == len(PROMPT)
    assert len(window.token_ids) == len(PROMPT) + 39  # the last token is never computed
    assert tapped.counts == {"taken": 39}
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(torch.tensor([window.token_ids]), output_hidden_states=True).hidden_states
    expected = torch.cat((states[1][0], states[2][0]), dim=-1)
    torch.testing.assert_close(window.rows.float(), expected, rtol=1e-4, atol=1e-4)


def test_rows_of_a_cached_prefix_are_there_too(tapped: Tapped) -> None:
    [first] = tapped.serve(make_spec(PROMPT, GREEDY))
    [second] = tapped.serve(make_spec(PROMPT, GREEDY))
    assert torch.equal(first.rows, second.rows)


def test_a_long_answer_gives_its_last_windows_alone(tapped: Tapped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.verifier_service.learning.tap.WINDOW_TOKENS", 32)
    windows = tapped.serve(make_spec(prompt_of(1), replace(GREEDY, max_tokens=200)))
    assert [len(window.token_ids) for window in windows] == [32] * 4
    assert [window.first_counted for window in windows] == [0] * 4
    joined = [token for window in reversed(windows) for token in window.token_ids]
    assert len(joined) == 128
    assert tapped.counts == {"taken": 128}


def test_a_learner_that_is_behind_costs_windows_and_nothing_else(tapped: Tapped) -> None:
    tapped.tap.windows = queue.Queue(maxsize=3)
    for seed in range(5):
        generate(tapped.engine, make_spec(prompt_of(seed), GREEDY), free_run=64)
    tapped.engine.between_rounds(lambda: None)
    assert tapped.tap.windows.qsize() == 3
    assert tapped.counts == {"taken": 3 * 39, "dropped": 2 * 39}


SEEDED = replace(GREEDY, temperature=1.0, seed=5)
UNSEEDED = replace(GREEDY, temperature=1.0)
REJECTION = SpeculationMode.REJECTION


@pytest.mark.parametrize(
    ("spec", "is_taken"),
    [
        (make_spec(PROMPT, GREEDY), True),
        (make_spec(PROMPT, UNSEEDED, REJECTION), True),
        (make_spec(PROMPT, SEEDED), True),  # exact: no draft can change it
        (make_spec(PROMPT, SEEDED, REJECTION), False),
        (make_spec(PROMPT, GREEDY, cache_salt="tenant"), False),
        (replace(make_spec(PROMPT, GREEDY), speculation=Speculation(learn=False)), False),
        (replace(make_spec(PROMPT, GREEDY), speculation=Speculation(learn=True)), True),
        (make_spec(PROMPT, replace(GREEDY, max_tokens=8)), None),  # too short to teach anything
    ],
)
def test_who_is_learned_from(tapped: Tapped, spec: SessionSpec, is_taken: bool | None) -> None:
    assert bool(tapped.serve(spec)) is bool(is_taken)
    assert list(tapped.counts) == ([] if is_taken is None else ["taken" if is_taken else "private"])
    assert may_learn_from(spec) is (is_taken is not False)


@pytest.fixture
def tapped_per_salt(loaded: LoadedModel, certificate: Certificate) -> Iterator[Tapped]:
    counts: Counter[str] = Counter()
    places = SaltPlaces(2, 1000)
    with running_engine(loaded, certificate) as engine:
        tap = Tap(LAYERS, engine.rounds.read_rows, lambda name, number: counts.update({name: number}), places)
        engine.when_sessions_end(tap.take, LAYERS)
        yield Tapped(engine, tap, counts)


@pytest.mark.parametrize(
    ("spec", "outcome"),
    [
        (make_spec(PROMPT, GREEDY, cache_salt="tenant"), "taken"),
        (make_spec(PROMPT, SEEDED, cache_salt="tenant"), "taken"),
        (make_spec(PROMPT, GREEDY), "private"),
        (make_spec(PROMPT, SEEDED, REJECTION, cache_salt="tenant"), "private"),
        (replace(make_spec(PROMPT, GREEDY, cache_salt="tenant"), speculation=Speculation(learn=False)), "private"),
    ],
)
def test_who_is_learned_from_where_each_salt_has_a_head(
    tapped_per_salt: Tapped, spec: SessionSpec, outcome: str
) -> None:
    windows = tapped_per_salt.serve(spec)
    assert tapped_per_salt.counts == {outcome: 39}
    assert [window.place for window in windows] == ([1] if outcome == "taken" else [])
    assert may_learn_from(spec, per_salt=True) is (outcome == "taken")


def test_windows_of_a_salt_are_of_its_sessions_alone(tapped_per_salt: Tapped) -> None:
    prompts = {salt: prompt_of(seed) for seed, salt in enumerate(("first", "second", "third"))}
    served = {
        salt: [window for _ in range(2) for window in tapped_per_salt.serve(make_spec(prompt, GREEDY, cache_salt=salt))]
        for salt, prompt in prompts.items()
    }
    for place, salt in enumerate(("first", "second"), start=1):
        assert [window.place for window in served[salt]] == [place] * 2
        for window in served[salt]:
            assert window.token_ids[: len(prompts[salt])] == prompts[salt]
    assert served["third"] == []  # there are two places
    assert tapped_per_salt.counts == {"taken": 4 * 39, "dropped": 2 * 39}


def test_one_session_in_ten_is_held_back_whoever_asks(tapped: Tapped) -> None:
    names = [f"session-{number}" for number in range(2000)]
    held_back = {name for name in names if is_held_back(name)}
    assert 150 < len(held_back) < 250
    for name in ("session-0", min(held_back)):
        [window] = tapped.serve(replace(make_spec(PROMPT, GREEDY), session_id=name))
        assert window.is_held_back is (name in held_back)
