"""A learner of a real head for a tiny target: fed what was served, it offers heads that draft better.

What it is fed comes from transformers' own forward of the target.
"""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.target_weights import load_target_weights
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.options import TRAINED_FURTHER
from outrider.training.heads.registry import load_objective
from outrider.training.learner import learner as learner_file
from outrider.training.learner.inbox import Inbox
from outrider.training.learner.learner import HeadLearner
from outrider.training.learner.windows import Texts, Window
from outrider.training.optim import Schedule
from tests.grid.heads import save_random_head
from tests.training.tiny import write_target

LENGTH = 40
CYCLE_TOKENS = 3000
RATES = ("_MUON_LR", "_LR")
# The target's forward is for one thread at a time.
FORWARD = threading.Lock()


class Stream(io.RawIOBase):
    """An endless input that a test writes to."""

    def __init__(self) -> None:
        self._data, self._ended = bytearray(), False
        self._changed = threading.Condition()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._data) or self._ended)
            part = bytes(self._data[: len(buffer)])
            del self._data[: len(part)]
        buffer[: len(part)] = part
        return len(part)

    def put(self, message: dict[str, Any], data: bytes = b"") -> None:
        with self._changed:
            self._data += json.dumps(message).encode() + b"\n" + data
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()


@dataclass
class Learning:
    """A learner that runs on a thread, and what it reports."""

    target: FrozenTarget
    folder: Path
    kind: str = "eagle3"
    served: list[tuple[int, str]] = field(default_factory=list)
    stream: Stream = field(default_factory=Stream)
    reports: list[dict[str, Any]] = field(default_factory=list)

    def start(self) -> HeadLearner:
        head = self.folder.parent / f"{self.kind}-head"
        weights = load_target_weights(self.target.path, torch.float32)
        if not head.exists():
            save_random_head(self.kind, weights, head)
        self.folder.mkdir(exist_ok=True)
        names = {"head": str(head), "target": str(self.target.path), "folder": str(self.folder)}
        numbers = {"share": 1.0, "cycle_tokens": CYCLE_TOKENS, "buffer_mb": 64, "hidden_size": self.target.hidden_size}
        self.stream.put(names | numbers | {"dtype": "float32", "served": self.served})
        inbox = Inbox(io.BufferedReader(self.stream))
        self.learner = HeadLearner(inbox, self.reports.append)
        inbox.start()
        self.thread = threading.Thread(target=self.learner.run, daemon=True)
        self.thread.start()
        return self.learner

    def feed(
        self, num_windows: int, seed: int, *, held_back: bool = False, poison: bool = False, place: int = 0
    ) -> None:
        """Windows of rows that repeat a short phrase of few tokens, as the target sees them; others in each place."""
        layers = (*self.learner._objective.feature_layers, self.target.num_layers)
        rng = np.random.default_rng(seed)
        phrases = rng.integers(8 * place, 8 * place + 8, (num_windows, 4))
        token_ids = torch.from_numpy(np.tile(phrases, (1, LENGTH // 4)))
        with FORWARD:
            rows = self.target.view(token_ids, tuple(dict.fromkeys(layers))).features
        if poison:
            rows = rows * float("nan")
        for ids, data in zip(token_ids, rows, strict=True):
            raw = data.contiguous().numpy().tobytes()
            message = {"token_ids": ids.tolist(), "first_counted": 4, "held_back": held_back, "place": place}
            self.stream.put(message | {"num_bytes": len(raw)}, raw)

    def wait(self, num_reports: int) -> dict[str, Any]:
        deadline = time.monotonic() + 120
        while len(self.reports) < num_reports:
            assert time.monotonic() < deadline, self.reports
            assert self.thread.is_alive()
            time.sleep(0.02)
        return self.reports[num_reports - 1]

    def end(self) -> None:
        self.stream.end()
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()

    def cycle(self, seed: int, num_reports: int, *, poison: bool = False) -> dict[str, Any]:
        self.feed(100, seed, poison=poison)
        return self.wait(num_reports)

    def tell(self, outcome: str, report: dict[str, Any]) -> None:
        self.stream.put({"outcome": outcome, "candidate": report["candidate"]})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return FrozenTarget(write_target(tmp_path_factory.mktemp("target")), torch.float32)


@pytest.fixture
def learning(target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Learning]:
    for name in RATES:
        monkeypatch.setattr(learner_file, name, 1e-2)  # a random head is not good already
    monkeypatch.setattr(learner_file, "_POLL_S", 0.02)
    running = Learning(target, tmp_path / "versions")
    yield running
    running.end()


@pytest.mark.parametrize("kind", TRAINED_FURTHER)
def test_it_offers_a_head_that_drafts_better_and_goes_on_from_it(learning: Learning, kind: str) -> None:
    learning.kind = kind
    learning.start()
    learning.feed(24, seed=1, held_back=True)
    first = learning.cycle(2, 1)
    assert "candidate" in first, first
    assert first["after"]["sampled"] > 1.01 * first["before"]["sampled"]
    assert first["num_tokens"] >= CYCLE_TOKENS
    weights = load_target_weights(learning.target.path, torch.float32)
    written = load_objective(Path(first["candidate"]), weights).head.state_dict()
    for name, tensor in learning.learner._heads[0].offered.items():
        torch.testing.assert_close(written[name.removeprefix("head.")], tensor, rtol=1e-2, atol=1e-4)
    learning.tell("taken", first)
    second = learning.cycle(3, 2)
    assert second["before"] == pytest.approx(first["after"])


def test_a_cycle_reads_no_more_however_much_has_come(learning: Learning) -> None:
    learning.start()
    learning.feed(500, seed=2)
    while not (texts := learning.learner._inbox.texts) or texts[0].trained_on.num_tokens < 500 * (LENGTH - 4):
        time.sleep(0.02)
    learning.feed(24, seed=1, held_back=True)
    first = learning.wait(1)
    assert first["num_tokens"] > 5 * CYCLE_TOKENS
    assert 0 < first["num_steps"] <= CYCLE_TOKENS / (LENGTH - 4) / 1.5  # new windows in a step


def test_it_trains_on_while_a_head_is_on_trial(learning: Learning) -> None:
    """Without traffic no trial ends: quiet hours are what a learner is to use."""
    learning.start()
    learning.feed(24, seed=1, held_back=True)
    first = learning.cycle(2, 1)
    head = learning.learner._heads[0]
    deadline = time.monotonic() + 60
    while head.visits_left or head.trained is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert learning.reports == [first], "it is judged when the trial is over"
    learning.tell("taken", first)
    second = learning.wait(2)
    assert second["num_tokens"] < first["num_tokens"] + CYCLE_TOKENS, "no other text than the first was about"
    assert second["before"] == pytest.approx(first["after"])
    assert "candidate" in second, second


def test_a_head_that_is_rolled_back_leaves_no_trace(learning: Learning) -> None:
    learning.start()
    before = learning.learner._state()
    learning.feed(24, seed=1, held_back=True)
    first = learning.cycle(2, 1)
    candidate = Path(first["candidate"])
    assert candidate.exists()
    learning.tell("rolled_back", first)
    deadline = time.monotonic() + 30
    while candidate.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    second = learning.cycle(2, 2)
    assert second["before"] == pytest.approx(learning.reports[0]["before"])
    served = learning.learner._heads[0].served
    assert set(before) == set(served)
    assert all(torch.equal(before[name], served[name]) for name in before)


def test_a_learning_rate_that_ruins_the_head_is_refused(learning: Learning, monkeypatch: pytest.MonkeyPatch) -> None:
    learning.start()
    learning.feed(24, seed=1, held_back=True)
    first = learning.cycle(2, 1)
    factor = Schedule.factor
    monkeypatch.setattr(Schedule, "factor", lambda self, step: 300.0 * factor(self, step))
    learning.tell("taken", first)
    ruined = learning.wait(2)
    assert "gains" in ruined["refused"] or "not finite" in ruined["refused"], ruined
    monkeypatch.setattr(Schedule, "factor", factor)
    third = learning.cycle(4, 3)
    assert third["before"] == pytest.approx(first["after"])


def test_rows_that_are_not_finite_are_not_learned_from(learning: Learning) -> None:
    learning.start()
    learning.feed(24, seed=1, held_back=True)
    learning.feed(100, seed=2, poison=True)
    learning.feed(10, seed=2, held_back=True, poison=True)
    assert "candidate" in learning.cycle(3, 1)
    for tensor in learning.learner._state().values():
        assert torch.isfinite(tensor.float()).all()


def test_gradients_that_a_diverged_cycle_left_are_not_learned_from(learning: Learning) -> None:
    learner = learning.start()
    for parameter in learner._trained():
        parameter.grad = torch.full_like(parameter, float("nan"))
    learning.feed(24, seed=1, held_back=True)
    assert "candidate" in learning.cycle(2, 1), learning.reports


def test_it_does_not_learn_from_less_than_a_cycle_or_with_nothing_to_judge_by(learning: Learning) -> None:
    learning.start()
    learning.feed(20, seed=1, held_back=True)
    learning.feed(20, seed=2)
    time.sleep(0.5)
    assert not learning.reports


def test_a_version_of_an_earlier_process_is_judged_before_it_is_offered(learning: Learning, tmp_path: Path) -> None:
    learning.start()
    learning.feed(24, seed=1, held_back=True)
    good = Path(learning.cycle(2, 1)["candidate"])
    again = Learning(learning.target, learning.folder)
    again.start()
    assert not again.reports
    again.feed(24, seed=5, held_back=True)
    report = again.wait(1)
    assert report["num_tokens"] == 0
    assert Path(report["candidate"]).parent == good.parent
    again.end()  # it removes what it offered last
    (good / "model.safetensors").write_bytes(b"nothing of the kind")
    for path in learning.folder.iterdir():
        if path != good:
            path.rename(tmp_path / path.name)
    damaged = Learning(learning.target, learning.folder)
    damaged.start()
    damaged.feed(24, seed=5, held_back=True)
    assert str(good) in damaged.wait(1)["refused"]
    damaged.end()


def test_only_the_newest_versions_are_kept(learning: Learning) -> None:
    learner = learning.start()
    head = learner._begin(0, Texts(1 << 20))
    for _ in range(5):
        learner._write(head)
    assert sorted(path.name for path in learning.folder.iterdir()) == ["version-3", "version-4", "version-5"]


def test_what_cannot_be_trained_further_is_refused(target: FrozenTarget, tmp_path: Path) -> None:
    weights = load_target_weights(target.path, torch.float32)
    with pytest.raises(CheckpointRefused):
        load_objective(tmp_path, weights)


@dataclass
class Places:
    """A learner with two places, whose tokens are others.

    By turn, what it trained on, the weights it began with, and those that the next turn is to go on from.
    """

    learning: Learning
    trained_on: list[set[int]]
    begun_with: list[dict[str, torch.Tensor]]
    left: list[dict[str, torch.Tensor]]

    def feed(self, place: int, num_windows: int = 100, seed: int = 2) -> None:
        self.learning.feed(24, seed=1, held_back=True, place=place)
        self.learning.feed(num_windows, seed, place=place)

    def head(self, place: int) -> dict[str, torch.Tensor]:
        return self.learning.learner._heads[place].served


@pytest.fixture
def places(learning: Learning, monkeypatch: pytest.MonkeyPatch) -> Places:
    train, trained_on = HeadLearner._train, list[set[int]]()
    begun_with, left = list[dict[str, torch.Tensor]](), list[dict[str, torch.Tensor]]()

    def noting(learner: HeadLearner, head: learner_file._Head, new: list[Window], older: list[Window]) -> int:
        trained_on.append({token for window in (*new, *older) for token in window.token_ids.tolist()})
        begun_with.append(learner._state())
        num_steps = train(learner, head, new, older)
        left.append(head.training)
        return num_steps

    monkeypatch.setattr(HeadLearner, "_train", noting)
    learning.start()
    return Places(learning, trained_on, begun_with, left)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_each_place_has_a_head_that_learned_from_its_texts_alone(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_file, "_VISITS", 1)
    learning = places.learning
    places.feed(1)
    first = learning.wait(1)
    assert first["place"] == 1
    places.feed(2)  # while the first is on trial
    second = learning.wait(2)
    assert second["place"] == 2
    assert places.trained_on == [set(range(8, 16)), set(range(16, 24))]
    learning.tell("taken", first)
    learning.tell("rolled_back", second)
    learning.feed(100, seed=3, place=1)
    third = learning.wait(3)
    assert third["before"] == pytest.approx(first["after"])
    learning.feed(100, seed=3, place=2)
    fourth = learning.wait(4)
    assert fourth["before"] == pytest.approx(second["before"])
    assert places.trained_on[2:] == [set(range(8, 16)), set(range(16, 24))]
    assert Path(first["candidate"]).parent.name == "place-1"
    base = learning.learner._first
    assert not same(places.head(1), base)
    assert same(places.head(2), base)
    assert [same(weights, base) for weights in places.begun_with] == [True, True, False, True]
    assert same(places.begun_with[2], places.left[0])


def test_a_place_with_much_text_does_not_starve_another(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Place 1 has three cycles' text whenever a turn ends, place 2 one."""
    for name in RATES:
        monkeypatch.setattr(learner_file, name, 1e-7)  # refused each time, so that no trial holds a place up
    learning, train = places.learning, HeadLearner._train

    def busy(learner: HeadLearner, head: learner_file._Head, new: list[Window], older: list[Window]) -> int:
        if len(places.trained_on) < 4:
            learning.feed(300, seed=3, place=1)
            time.sleep(0.3)  # it is read beside
        return train(learner, head, new, older)

    monkeypatch.setattr(HeadLearner, "_train", busy)
    places.feed(1, 300)
    learning.wait(1)
    places.feed(2)
    learning.wait(4)
    assert [min(tokens) // 8 for tokens in places.trained_on[:4]].count(2) >= 1


def test_what_belongs_to_a_lost_place_is_gone(places: Places) -> None:
    learning = places.learning
    places.feed(1)
    folder = Path(learning.wait(1)["candidate"]).parent
    learning.stream.put({"lost": 1})
    deadline = time.monotonic() + 30
    while folder.exists() or 1 in learning.learner._heads:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not learning.learner._inbox.texts


def test_a_place_goes_on_from_the_head_that_serves_after_a_new_start(places: Places) -> None:
    learning = places.learning
    places.feed(1)
    first = learning.wait(1)
    again = Learning(learning.target, learning.folder, served=[(1, first["candidate"])])
    again.start()
    again.feed(24, seed=1, held_back=True, place=1)
    again.feed(100, seed=3, place=1)
    report = again.wait(1)
    assert report["num_tokens"] >= CYCLE_TOKENS  # what serves is not offered again
    assert report["before"]["greedy"] == pytest.approx(first["after"]["greedy"], rel=0.02)  # it is in bfloat16
    again.end()
