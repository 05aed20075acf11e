"""Trains a served head further, in cycles: enough new text, a bounded number of visits to it, a judgement.

What a pilot on this design found (docs/drafters.md): labels must be the target's laws; a quarter of older text keeps
what the head knew; a learner that outruns its traffic makes heads worse.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.target_weights import load_target_weights
from outrider.training.errors import DivergenceError, SettingError, TrainingError
from outrider.training.heads.registry import load_objective
from outrider.training.learner.inbox import Inbox
from outrider.training.learner.judge import FEWEST_WINDOWS, Lengths, Verdict, judge
from outrider.training.learner.windows import Window, batch_of
from outrider.training.optim import Schedule, scheduled_adamw

# visits; of each new token in a cycle: more teaches the text itself, not its kind
_VISITS = 3
# windows; in a step, of which the last are from older traffic
_WINDOWS = 8
_OLDER_WINDOWS = 2
# learning rate of AdamW for a head that is good already: higher ones lose first, whatever the text. Muon learns as
# fast, but its products are bfloat16's, which CPUs without them compute one by one.
_LR = 3e-4
_WARMUP_STEPS = 10
# share of the steps; after them the rates fall to nothing
_DECAY_FROM = 0.6
# windows; newest and older ones that a judgement reads at most, for a standard error near 1 %
_JUDGED = 24
# versions; candidates kept in the folder: the one that serves, the one before it, and the one in question
_KEPT = 3
# bytes; most that arrays of [positions, vocabulary] take together, beside what serves; 75 positions at a vocabulary of
# 49,152, enough for dense matrix products
_SLICE_BYTES = 128 << 20
# seconds; between two looks at what has come
_POLL_S = 0.5

Report = Callable[[dict[str, Any]], None]


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


class HeadLearner:
    """A head in training, and the one that serves. `report` takes what the verifier is to know, as JSON."""

    def __init__(self, inbox: Inbox, report: Report) -> None:
        """Raises CheckpointRefused or SettingError for a head that cannot be trained further."""
        settings = inbox.settings
        self._inbox, self._report, self._folder = inbox, report, settings.folder
        weights = load_target_weights(settings.target, torch.float32)
        if weights.lm_head_extra is not None:
            raise SettingError(f"{settings.target} applies {weights.lm_head_extra} after its output head")
        self._lm_head, self._vocab_size = weights.lm_head, weights.vocab_size
        self._objective = load_objective(settings.head, weights)
        self._objective.slice_bytes = _SLICE_BYTES
        self._num_features = len(self._objective.feature_layers) * weights.hidden_size
        self._served = self._state()
        self._throttle = Throttle(settings.share)
        self._random = random.Random(0)
        self._noise = torch.Generator().manual_seed(0)
        versions = self._versions()
        self._num_versions = _number(versions[-1]) if versions else 0
        # The newest of an earlier process, until it is judged.
        self._earlier = versions[-1] if versions and versions[-1] != settings.head else None
        self._weights = weights
        self._learned_until = 0

    def run(self) -> None:
        """Learns until the input ends."""
        while not self._inbox.has_ended.is_set():
            if self._earlier is not None and self._has_enough_to_judge():
                self._offer_earlier(self._earlier)
                self._earlier = None
            with self._inbox.lock:
                pool = self._inbox.trained_on
                num_new = pool.num_tokens - self._learned_until
                is_enough = num_new >= self._inbox.settings.cycle_tokens and self._has_enough_to_judge()
                new = pool.newest(num_new) if is_enough else []
                older = pool.older(len(new))
                num_tokens = pool.num_tokens
            if not new:
                self._inbox.has_ended.wait(_POLL_S)
                continue
            self._learned_until = num_tokens
            self._cycle(new, older, num_tokens)

    def _cycle(self, new: list[Window], older: list[Window], num_tokens: int) -> None:
        self._throttle.begin()
        began = time.process_time()
        try:
            num_steps = self._train(new, older)
        except DivergenceError as error:
            self._restore()
            self._report({"refused": str(error), "num_tokens": num_tokens})
            return
        self._offer({"num_tokens": num_tokens, "num_steps": num_steps}, began)

    def _offer_earlier(self, path: Path) -> None:
        """Judges the newest version of an earlier process, which is not trusted, by what is served now."""
        self._throttle.begin()
        began = time.process_time()
        try:
            state = load_objective(path, self._weights).head.state_dict()
            self._objective.head.load_state_dict(state)
        except (CheckpointRefused, TrainingError, RuntimeError) as error:
            self._restore()
            self._report({"refused": f"{path}: {error}", "num_tokens": 0})
            return
        self._offer({"num_tokens": 0, "num_steps": 0}, began)

    def _offer(self, report: dict[str, Any], began: float) -> None:
        """Judges the head in training, and waits for what becomes of it if it is better."""
        verdict = self._judge()
        report |= {
            "cpu_s": round(time.process_time() - began, 1),
            "num_windows": verdict.num_windows,
            "before": vars(verdict.before),
            "after": vars(verdict.after),
        }
        if verdict.refusal:
            self._report(report | {"refused": verdict.refusal})
            if not verdict.after.mean >= verdict.before.mean:  # also where it is not finite
                self._restore()
            return
        candidate = self._write()
        self._report(report | {"candidate": str(candidate)})
        if self._inbox.outcomes.get() == "taken":
            self._served = self._state()
        else:
            shutil.rmtree(candidate, ignore_errors=True)  # it would be offered again after a new start
            self._restore()

    def _train(self, new: list[Window], older: list[Window]) -> int:
        """Returns the number of steps. Raises DivergenceError."""
        objective = self._objective.train()
        num_older = min(_OLDER_WINDOWS, len(older))
        num_new = _WINDOWS - num_older
        num_steps = max(1, _VISITS * len(new) // num_new)
        optimizer = scheduled_adamw(objective, _LR, weight_decay=0.0)
        schedule = Schedule(min(_WARMUP_STEPS, num_steps // 4), int(_DECAY_FROM * num_steps), num_steps)
        waiting: list[Window] = []
        for step in range(num_steps):
            while len(waiting) < num_new:
                waiting += self._random.sample(new, len(new))
            windows, waiting = waiting[:num_new], waiting[num_new:]
            windows += self._random.sample(older, num_older)
            loss, _ = objective(*self._batch(windows), self._noise)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self._trained(), 1.0)
            if not torch.isfinite(norm):
                raise DivergenceError(f"the gradient of step {step + 1} is not finite")
            optimizer.step(schedule.factor(step))
            self._throttle.rest()
            if self._inbox.has_ended.is_set():
                break
        return num_steps

    def _has_enough_to_judge(self) -> bool:
        return len(self._inbox.held_back) >= FEWEST_WINDOWS

    def _judge(self) -> Verdict:
        """Compares the head in training with the one that serves."""
        with self._inbox.lock:
            pool = self._inbox.held_back
            newest = pool.newest(1 << 62)[: _JUDGED // 2]
            older = pool.older(len(newest))
        older = self._random.sample(older, min(len(older), _JUDGED - len(newest)))
        windows, is_old = [*newest, *older], [False] * len(newest) + [True] * len(older)
        after = self._lengths(windows)
        candidate = self._state()
        self._restore()
        before = self._lengths(windows)
        self._objective.head.load_state_dict(candidate)
        return judge(before, after, is_old)

    @torch.no_grad()
    def _lengths(self, windows: list[Window]) -> list[Lengths]:
        objective = self._objective.eval()
        found = []
        for window in windows:
            found.append(Lengths.of(objective(*self._batch([window]), self._noise)[1]))
            self._throttle.rest()
        return found

    def _batch(self, windows: list[Window]) -> Any:
        return batch_of(windows, self._read_out, self._vocab_size, self._num_features)

    def _read_out(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self._lm_head.T

    def _trained(self) -> list[torch.nn.Parameter]:
        return [each for each in self._objective.parameters() if each.requires_grad]

    def _state(self) -> dict[str, torch.Tensor]:
        return {name: each.clone() for name, each in self._objective.head.state_dict().items()}

    def _restore(self) -> None:
        self._objective.head.load_state_dict(self._served)

    def _write(self) -> Path:
        """Writes the head in its public layout, whole or not at all, and removes versions that nothing needs."""
        self._num_versions += 1
        out = self._folder / f"version-{self._num_versions}"
        unfinished = out.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        self._objective.export(unfinished, torch.bfloat16, self._inbox.settings.target.name)
        unfinished.rename(out)
        for old in self._versions()[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return out

    def _versions(self) -> list[Path]:
        found = [path for path in self._folder.glob("version-*") if path.name.removeprefix("version-").isdecimal()]
        return sorted(found, key=_number)


def _number(version: Path) -> int:
    return int(version.name.removeprefix("version-"))
