"""Trains served heads further, in cycles: a bounded number of tokens of new text, and a judgement.

There is one head for all texts, or one for each place, which learns from the texts of that place alone. Those with
enough text take turns, the one whose last turn is longest ago first: a place with much text holds up no other.

What a pilot on this design found (docs/drafters.md): labels must be the target's laws; a quarter of older text keeps
what the head knew; a learner that outruns its traffic makes heads worse.
"""

from __future__ import annotations

import copy
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.target_weights import load_target_weights
from outrider.training.errors import DivergenceError, SettingError, TrainingError
from outrider.training.heads.interface import Objective
from outrider.training.heads.registry import load_objective
from outrider.training.learner.inbox import Inbox
from outrider.training.learner.judge import FEWEST_WINDOWS, Lengths, Verdict, judge
from outrider.training.learner.windows import Texts, Window, batch_of
from outrider.training.optim import (
    HybridOptimizer,
    Schedule,
    ScheduledOptimizer,
    has_matrices_inside_layers,
    scheduled_adamw,
)

# cycles; about the same text, while no newer has come: with more visits a head learns the text itself, not its kind
_VISITS = 3
# windows; in a step: of the same 26,000 tokens, steps of eight taught the demo's head half as much as steps of two
_WINDOWS = 2
# share of the windows; from older traffic
_OLDER_SHARE = 0.25
# learning rates of Muon, for the matrices inside layers, and of AdamW for all else, of a head that is good already:
# higher ones lose first, whatever the text. One cycle of Python answers brought SmolLM2's head 9.4, 10.2 and 8.1 % with
# 5e-4, 1e-3 and 2e-3, and 8.5 % with AdamW alone; longer runs on the demo's, twice as much as AdamW.
_MUON_LR, _LR = 1e-3, 3e-4
_WARMUP_STEPS = 10
# share of a cycle's steps, the last ones, in which the rates fall to nothing for the head that is judged. The next
# cycle goes on from before them: cycles that each began anew behind them taught hardly more than one
_DECAY_SHARE = 0.3
# windows, half of them new and half older; those that a judgement begins with, and the most that it reads if a gain may
# be chance: the standard error of the first is 1 to 2 % on chats of SmolLM2, 6 % on the demo target's more uneven texts
_JUDGED, _MOST_JUDGED = 24, 72
# versions; candidates kept in the folder: the one that serves, the one before it, and the one in question
_KEPT = 3
# bytes; most that arrays of [positions, vocabulary] take together, beside what serves; 75 positions at a vocabulary of
# 49,152, enough for dense matrix products
_SLICE_BYTES = 128 << 20
# seconds; between two looks at what has come
_POLL_S = 0.5

Report = Callable[[dict[str, Any]], None]
State = dict[str, torch.Tensor]


class Throttle:
    """Keeps this process's CPU time at `share` seconds per second, over each stretch of work."""

    def __init__(self, share: float) -> None:
        self._share = share
        self.begin()

    def begin(self) -> None:
        self._began, self._cpu_s = time.monotonic(), time.process_time()

    def rest(self) -> None:
        owed_s = (time.process_time() - self._cpu_s) / self._share - (time.monotonic() - self._began)
        if owed_s > 0:
            time.sleep(owed_s)


@dataclass(frozen=True)
class _Trained:
    """Weights that are to be judged, and what is reported of them: counts, and seconds of CPU."""

    state: State
    num_tokens: int
    num_steps: int
    cpu_s: float


@dataclass
class _Head:
    """A head in training, the one that serves, and the texts of the place that they are for: their trained weights.

    folder: of its versions. earlier: the newest of an earlier process, until it is judged. candidate, offered: the
    folder and weights of the one on trial; empty: there is none. trained: the next one, which is judged when no trial
    is on. optimizer: of the one in training, as that is; None: a new one. Cycles are about the text since token
    lesson_from, visits_left more of them if none newer comes; that before learned_until has had its turn.
    """

    place: int
    texts: Texts
    folder: Path
    served: State
    training: State
    earlier: Path | None
    num_versions: int
    candidate: str = ""
    offered: State = field(default_factory=dict)
    trained: _Trained | None = None
    optimizer: ScheduledOptimizer | None = None
    lesson_from: int = 0
    learned_until: int = 0
    visits_left: int = 0
    last_turn: int = 0

    def is_due(self, cycle_tokens: int) -> bool:
        if len(self.texts.held_back) < FEWEST_WINDOWS:
            return False
        if not self.candidate and (self.earlier is not None or self.trained is not None):
            return True
        return self.visits_left > 0 or self.num_new >= cycle_tokens

    @property
    def num_new(self) -> int:
        return self.texts.trained_on.num_tokens - self.learned_until

    def begin_again(self) -> None:
        """Drops what was learned since the head that serves."""
        self.training, self.optimizer, self.visits_left, self.trained = self.served, None, 0, None


class HeadLearner:
    """Heads in training, and those that serve. `report` takes what the verifier is to know, as JSON."""

    def __init__(self, inbox: Inbox, report: Report) -> None:
        """Raises CheckpointRefused or SettingError for a head that cannot be trained further."""
        settings = inbox.settings
        self._inbox, self._report, self._settings = inbox, report, settings
        weights = load_target_weights(settings.target, torch.float32)
        if weights.lm_head_extra is not None:
            raise SettingError(f"{settings.target} applies {weights.lm_head_extra} after its output head")
        self._weights = weights
        # Of the head whose turn it is.
        self._objective = load_objective(settings.head, weights)
        self._objective.slice_bytes = _SLICE_BYTES
        self._num_features = len(self._objective.feature_layers) * weights.hidden_size
        self._first = self._state()
        self._heads: dict[int, _Head] = {}
        self._num_turns = 0
        self._throttle = Throttle(settings.share)
        self._random = random.Random(0)
        self._noise = torch.Generator().manual_seed(0)

    def run(self) -> None:
        """Learns until the input ends."""
        while not self._inbox.has_ended.is_set():
            self._take_outcomes()
            head = self._next()
            if head is None:
                self._inbox.has_ended.wait(_POLL_S)
                continue
            self._num_turns += 1
            head.last_turn = self._num_turns
            self._throttle.begin()
            if head.earlier is not None:
                self._take_earlier(head, head.earlier)
            elif head.trained is None or head.candidate:
                self._cycle(head)
            if head.trained is not None and not head.candidate:
                self._offer(head, head.trained)

    def _next(self) -> _Head | None:
        """Returns the head whose turn it is; None: none has enough text. Drops those whose place is lost."""
        with self._inbox.lock:
            texts = dict(self._inbox.texts)
        for place in self._heads.keys() - texts.keys():
            shutil.rmtree(self._heads.pop(place).folder, ignore_errors=True)
        for place in texts.keys() - self._heads.keys():
            self._heads[place] = self._begin(place, texts[place])
        with self._inbox.lock:
            due = [head for head in self._heads.values() if head.is_due(self._settings.cycle_tokens)]
        return min(due, key=lambda head: head.last_turn, default=None)

    def _begin(self, place: int, texts: Texts) -> _Head:
        folder = self._settings.folder / f"place-{place}" if place else self._settings.folder
        served, state = self._settings.served.get(place), self._first
        if served is not None:
            self._read(served)
            state = self._state()
        versions = _versions(folder)
        earlier = versions[-1] if versions and versions[-1] not in (served, self._settings.head) else None
        return _Head(place, texts, folder, state, state, earlier, _number(versions[-1]) if versions else 0)

    def _take_outcomes(self) -> None:
        while not self._inbox.outcomes.empty():
            candidate, outcome = self._inbox.outcomes.get()
            for head in self._heads.values():
                if head.candidate != candidate:
                    continue
                head.candidate = ""
                if outcome == "taken":
                    head.served = head.offered
                else:
                    shutil.rmtree(candidate, ignore_errors=True)  # it would be offered again after a new start
                    head.begin_again()

    def _cycle(self, head: _Head) -> None:
        """Trains a head on; also while the one before is on trial, which takes as long as there is no traffic."""
        began = time.process_time()
        with self._inbox.lock:
            pool = head.texts.trained_on
            num_tokens = pool.num_tokens
            if head.num_new >= self._settings.cycle_tokens:
                head.lesson_from, head.learned_until, head.visits_left = head.learned_until, num_tokens, _VISITS
            new = pool.newest(num_tokens - head.lesson_from)
            older = pool.older(len(new))
        head.visits_left -= 1
        self._load(head.training)
        try:
            num_steps = self._train(head, new, older)
        except DivergenceError as error:
            head.begin_again()
            self._report({"refused": str(error), "num_tokens": num_tokens})
            return
        head.trained = _Trained(self._state(), num_tokens, num_steps, time.process_time() - began)

    def _take_earlier(self, head: _Head, path: Path) -> None:
        """Has the newest version of an earlier process, which is not trusted, judged by what is served now."""
        head.earlier = None
        try:
            self._read(path)
        except (CheckpointRefused, TrainingError, RuntimeError) as error:
            self._report({"refused": f"{path}: {error}", "num_tokens": 0})
            return
        head.training = self._state()
        head.trained = _Trained(head.training, 0, 0, 0.0)

    def _offer(self, head: _Head, trained: _Trained) -> None:
        """Judges what was trained, and offers it to the verifier if it is better than the head that serves."""
        began = time.process_time()
        head.trained = None
        verdict = self._judge(head, trained.state)
        report: dict[str, Any] = {
            "num_tokens": trained.num_tokens,
            "num_steps": trained.num_steps,
            "cpu_s": round(trained.cpu_s + time.process_time() - began, 1),
            "num_windows": verdict.num_windows,
            "before": vars(verdict.before),
            "after": vars(verdict.after),
        }
        if verdict.refusal:
            self._report(report | {"refused": verdict.refusal})
            if not verdict.after.mean >= verdict.before.mean:  # also where it is not finite
                head.begin_again()
            return
        self._load(trained.state)
        head.offered, head.candidate = trained.state, str(self._write(head))
        self._report(report | {"candidate": head.candidate, "place": head.place})

    def _train(self, head: _Head, new: list[Window], older: list[Window]) -> int:
        """Leaves the weights to be judged in the objective, and those to go on from in `head`.

        Returns the number of steps. Raises DivergenceError.
        """
        objective = self._objective.train()
        objective.zero_grad()  # a cycle that diverged leaves its gradients, and all heads share these weights
        older_share = _OLDER_SHARE if older else 0.0
        tokens_a_step = _WINDOWS * (1.0 - older_share) * fmean(window.num_counted for window in new)
        num_steps = max(2, int(self._settings.cycle_tokens / tokens_a_step))
        decay_from = num_steps - max(1, int(_DECAY_SHARE * num_steps))
        warmup_steps = 0 if head.optimizer is not None else min(_WARMUP_STEPS, num_steps // 4)
        schedule = Schedule(warmup_steps, decay_from, num_steps)
        optimizer = head.optimizer = head.optimizer or _optimizer(objective)
        waiting: list[Window] = []
        for step in range(num_steps):
            if step == decay_from:
                head.training, moments = self._state(), copy.deepcopy(optimizer.state_dict())
            windows: list[Window] = []
            while len(windows) < _WINDOWS:
                if self._random.random() < older_share:
                    windows.append(self._random.choice(older))
                    continue
                waiting = waiting or self._random.sample(new, len(new))
                windows.append(waiting.pop())
            loss, _ = objective(*self._batch(windows), self._noise)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self._trained(), 1.0)
            if not torch.isfinite(norm):
                raise DivergenceError(f"the gradient of step {step + 1} is not finite")
            optimizer.step(schedule.factor(step))
            self._throttle.rest()
            if self._inbox.has_ended.is_set():
                return num_steps
        optimizer.load_state_dict(moments)
        return num_steps

    def _judge(self, head: _Head, trained: State) -> Verdict:
        """Compares what was trained with the head that serves, on more windows as long as these do not tell."""
        with self._inbox.lock:
            pool = head.texts.held_back
            newest = pool.newest(1 << 62)[: (min(len(pool), _MOST_JUDGED) + 1) // 2]
            older = pool.older(len(newest))
        older = self._random.sample(older, min(len(older), len(newest)))
        before: list[Lengths] = []
        after: list[Lengths] = []
        is_old: list[bool] = []
        for start in range(0, len(newest), _JUDGED // 2):
            new, old = (windows[start : start + _JUDGED // 2] for windows in (newest, older))
            is_old += [False] * len(new) + [True] * len(old)
            self._load(trained)
            after += self._lengths([*new, *old])
            self._load(head.served)
            before += self._lengths([*new, *old])
            verdict = judge(before, after, is_old)
            if not verdict.is_doubtful:
                break
        return verdict

    @torch.no_grad()
    def _lengths(self, windows: list[Window]) -> list[Lengths]:
        objective = self._objective.eval()
        found = []
        for window in windows:
            found.append(Lengths.of(objective(*self._batch([window]), self._noise)[1]))
            self._throttle.rest()
        return found

    def _batch(self, windows: list[Window]) -> Any:
        return batch_of(windows, self._read_out, self._weights.vocab_size, self._num_features)

    def _read_out(self, hidden: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        lm_head = self._weights.lm_head
        return hidden @ (lm_head if token_ids is None else lm_head[token_ids]).T

    def _trained(self) -> list[torch.nn.Parameter]:
        return [each for each in self._objective.parameters() if each.requires_grad]

    def _state(self) -> State:
        """Copies what is trained; the target's own weights stay as they are."""
        return {name: each.detach().clone() for name, each in self._objective.named_parameters() if each.requires_grad}

    def _load(self, state: State) -> None:
        self._objective.load_state_dict(state, strict=False)

    def _read(self, folder: Path) -> None:
        """Reads a version into the objective. Raises CheckpointRefused, TrainingError or RuntimeError."""
        self._objective.head.load_state_dict(load_objective(folder, self._weights).head.state_dict())

    def _write(self, head: _Head) -> Path:
        """Writes what was trained in its public layout, whole or not at all; removes versions that nothing needs."""
        head.num_versions += 1
        out = head.folder / f"version-{head.num_versions}"
        unfinished = out.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        self._objective.export(unfinished, torch.bfloat16, self._settings.target.name)
        unfinished.rename(out)
        for old in _versions(head.folder)[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return out


def _optimizer(objective: Objective) -> ScheduledOptimizer:
    if has_matrices_inside_layers(objective):
        return HybridOptimizer(objective, _MUON_LR, _LR, 0.0)
    return scheduled_adamw(objective, _LR, weight_decay=0.0)


def _versions(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("version-*") if path.name.removeprefix("version-").isdecimal()]
    return sorted(found, key=_number)


def _number(version: Path) -> int:
    return int(version.name.removeprefix("version-"))
