"""A verifier whose learner is wrong, slow, silent or dead serves on; a head that drafts worse does not stay.

The learner's process is a script that does what a broken one would. The real one: tests/e2e/drafting/test_learning.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.drafting.serving.versions import VersionedMethod
from outrider.shared.messages import LocalDrafts, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.learning.learner import Learner, LearnerSettings
from outrider.verifier_service.learning.record import LearningRecord
from outrider.verifier_service.local_methods import build_local_methods, draft_loader
from tests.grid.driver import Driver, Session
from tests.grid.heads import save_random_head
from tests.grid.pools import CHUNKS, ROOMY_BLOCKS, Pool, Pools
from tests.verifier_service.drafting.drafting_pair import LAW_VOCAB_SIZE
from tests.verifier_service.drafting.other_weights import with_noise

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
# Reads its settings, then what follows; `offer` and `wait` are how a learner speaks.
PRELUDE = """
import json, sys, time
settings = json.loads(sys.stdin.buffer.readline())
def say(line): print(line, flush=True)
def offer(folder):
    lengths = {"greedy": 2.0, "sampled": 2.0}
    say(json.dumps({"candidate": folder, "before": lengths, "after": lengths, "num_tokens": 1}))
def outcome():
    while line := sys.stdin.buffer.readline():
        message = json.loads(line)
        if "outcome" in message: return message["outcome"]
        sys.stdin.buffer.read(message["num_bytes"])
    sys.exit()
"""


@dataclass
class Serving:
    pool: Pool
    method: VersionedMethod
    learner: Learner

    def metric(self, name: str, **labels: str) -> float:
        return self.pool.registry.get_sample_value(name, labels) or 0.0

    def decode(self, run: int, num_sessions: int = 5) -> list[tuple[int, ...]]:
        sessions = []
        for key in range(num_sessions):
            prompt = tuple(3 + (key * 7 + place * place) % (LAW_VOCAB_SIZE - 3) for place in range(20 + 5 * key))
            spec = SessionSpec(f"{run}-{key}", 0, prompt, (), GREEDY, SpeculationMode.EXACT, stream_key=key)
            sessions.append(Session(spec, None, 0, 50, local=LocalDrafts("eagle3", 4)))
        Driver(self.pool).run(sessions)
        assert [session.failure for session in sessions] == [""] * len(sessions)
        return [tuple(session.output) for session in sessions]

    def decode_until(self, happened: Callable[[], bool], seconds: float = 200.0) -> int:
        """Serves until it has happened, with the same bytes throughout; returns the rounds with drafts it took."""
        expected, deadline, run = self.decode(0), time.monotonic() + seconds, 0
        before = self.metric("outrider:verify_rows_total", draft="yes")
        while not happened():
            assert time.monotonic() < deadline
            run += 1
            assert self.decode(run) == expected
        return int(self.metric("outrider:verify_rows_total", draft="yes") - before)


@pytest.fixture(scope="module")
def heads(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    save_random_head("eagle3", pools.target, folder / "first")
    return {"first": folder / "first", "other": with_noise(folder / "first", folder / "other")}


@contextmanager
def serving(pools: Pools, heads: dict[str, Path], script: str, folder: Path) -> Iterator[Serving]:
    config = VerifierConfig(
        model=pools.target.path,
        local_draft_model=(str(heads["first"]),),
        local_methods=("eagle3",),
        local_kv_cache_mb=16,
        learn="shared",
        dtype="float32",
        num_threads=1,
    )
    [method] = build_local_methods(config, pools.target, logging.getLogger()).values()
    assert isinstance(method, VersionedMethod)
    pool = pools.start(CHUNKS["chunk16"], ROOMY_BLOCKS, {"eagle3": method})
    engine = pool.engine
    layers = (*method.info.hidden_layers, pools.target.num_layers)
    record = LearningRecord(pool.registry)
    tap = engine.tap_for(layers, record.count_tokens)
    settings = LearnerSettings(str(heads["first"]), pools.target.path, str(folder), 1.0, 1000, 16, "float32", 64)
    loader = draft_loader(config, engine, pool.registry, logging.getLogger())
    command = (sys.executable, "-c", PRELUDE + script)
    learner = Learner(settings, tap, loader.load, record, logging.getLogger(), command)
    learner.start()
    try:
        yield Serving(pool, method, learner)
        engine.check_integrity()
    finally:
        learner.stop()
        engine.stop()


def test_a_head_that_drafts_worse_is_rolled_back_within_200_rounds(
    pools: Pools, heads: dict[str, Path], tmp_path: Path
) -> None:
    """Its drafts are those of a method that knows nothing, beside the one that was served: acceptance is made so."""
    script = f"offer({str(heads['other'])!r})\nsay(json.dumps({{'refused': outcome(), 'num_tokens': 1}}))\noutcome()"
    with serving(pools, heads, script, tmp_path) as served:
        observe = served.method.observe

        def worse(session, num_accepted: int) -> None:  # type: ignore[no-untyped-def]
            is_newest = served.method._of[id(session)] is served.method._newest
            observe(session, 0 if is_newest else 2 + num_accepted)

        served.method.observe = worse  # type: ignore[method-assign]
        deadline = time.monotonic() + 60
        while served.method.info.version == 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        rounds = served.decode_until(lambda: served.method.info.version == 1)
        assert rounds < 200 + 5 * 40  # the sessions of the run in which it was seen end first
        assert served.metric("outrider:learned_heads_total", outcome="rolled_back") == 1
        deadline = time.monotonic() + 20  # the learner was told
        while served.metric("outrider:learned_heads_total", outcome="refused") == 0:
            assert time.monotonic() < deadline
            served.decode(99)


def test_a_head_as_good_is_taken_and_the_learner_goes_on_from_it(
    pools: Pools, heads: dict[str, Path], tmp_path: Path
) -> None:
    script = f"offer({str(heads['first'])!r})\noutcome()\nsys.exit(1)"
    with serving(pools, heads, script, tmp_path) as served:
        served.decode_until(lambda: served.metric("outrider:learned_heads_total", outcome="taken") >= 1)
        assert served.method.info.version >= 2


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("say('not json')\ntime.sleep(100)", "a line that is no report"),
        ("say('[1]')\ntime.sleep(100)", "a report of the wrong kind"),
        ("sys.exit(3)", "a crash"),
        ("import os\nos.kill(os.getpid(), 9)", "killed"),
    ],
)
def test_a_broken_learner_is_started_again_a_few_times_and_then_left(
    pools: Pools, heads: dict[str, Path], script: str, why: str, tmp_path: Path
) -> None:
    starts = tmp_path / "starts"
    script = f"open({str(starts)!r}, 'a').write('x')\n{script}"
    with serving(pools, heads, script, tmp_path) as served:
        thread = served.learner._thread
        assert isinstance(thread, threading.Thread)
        served.decode_until(lambda: not thread.is_alive())
        assert starts.read_text() == "xxxx", why
        assert served.method.info.version == 1


def test_one_that_cannot_learn_is_not_started_again(pools: Pools, heads: dict[str, Path], tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    script = f"open({str(starts)!r}, 'a').write('x')\nsay(json.dumps({{'cannot': 'this head'}}))"
    with serving(pools, heads, script, tmp_path) as served:
        thread = served.learner._thread
        assert thread is not None
        served.decode_until(lambda: not thread.is_alive())
        assert starts.read_text() == "x"


def test_a_head_that_cannot_be_read_is_refused(pools: Pools, heads: dict[str, Path], tmp_path: Path) -> None:
    script = f"offer({str(tmp_path / 'nowhere')!r})\noffer(outcome()) if False else outcome()\noutcome()"
    with serving(pools, heads, script, tmp_path) as served:
        served.decode_until(lambda: served.metric("outrider:learned_heads_total", outcome="refused") == 1)
        assert served.method.info.version == 1


def test_one_that_hangs_holds_nobody_up(pools: Pools, heads: dict[str, Path], tmp_path: Path) -> None:
    with serving(pools, heads, "time.sleep(1000)", tmp_path) as served:
        served.decode_until(lambda: served.metric("outrider:learner_tokens_total", outcome="dropped") > 0, 120)
        began = time.monotonic()
    assert time.monotonic() - began < 15
