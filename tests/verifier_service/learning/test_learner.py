"""A verifier whose learner is wrong, slow, silent or dead serves on; a head that drafts worse does not stay.

The learner's process is a script that does what a broken one would. The real one: tests/e2e/drafting/test_learning.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from outrider.drafting.serving.versions import VersionedMethod
from outrider.drafting.session import DraftSession
from outrider.shared.messages import LocalDrafts, Proposal, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.learning.learner import Learner, LearnerSettings
from outrider.verifier_service.learning.places import SaltPlaces
from outrider.verifier_service.learning.record import LearningRecord
from outrider.verifier_service.learning.tap import Tap
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
def offer(folder, place=0):
    lengths = {"greedy": 2.0, "sampled": 2.0}
    report = {"candidate": folder, "place": place, "before": lengths, "after": lengths, "num_tokens": 1}
    say(json.dumps(report))
def message():
    line = sys.stdin.buffer.readline()
    if not line: sys.exit()
    found = json.loads(line)
    sys.stdin.buffer.read(found.get("num_bytes", 0))
    return found
def outcome():
    while True:
        found = message()
        if "outcome" in found: return found["outcome"]
"""


def prompt_of(key: int) -> tuple[int, ...]:
    return tuple(3 + (key * 7 + place * place) % (LAW_VOCAB_SIZE - 3) for place in range(20 + 5 * key))


@dataclass
class Serving:
    pool: Pool
    method: VersionedMethod
    learner: Learner
    record: LearningRecord
    salts: tuple[str, ...] = ("",)

    def metric(self, name: str, **labels: str) -> float:
        return self.pool.registry.get_sample_value(name, labels) or 0.0

    def decode(self, run: int, num_sessions: int = 5) -> list[tuple[int, ...]]:
        """The sessions have the serving's salts in turn."""
        sessions = []
        for key in range(num_sessions):
            prompt = prompt_of(key)
            salt = self.salts[key % len(self.salts)]
            spec = SessionSpec(
                f"{run}-{key}", 0, prompt, (), GREEDY, SpeculationMode.EXACT, stream_key=key, cache_salt=salt
            )
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
    others = {name: with_noise(folder / "first", folder / name) for name in ("other", "of-a", "of-b")}
    return {"first": folder / "first", **others}


@contextmanager
def serving(
    pools: Pools, heads: dict[str, Path], script: str, folder: Path, places: SaltPlaces | None = None
) -> Iterator[Serving]:
    config = VerifierConfig(
        model=pools.target.path,
        local_draft_model=(str(heads["first"]),),
        local_methods=("eagle3",),
        local_kv_cache_mb=16,
        learn="per-salt" if places is not None else "shared",
        dtype="float32",
        num_threads=1,
    )
    [method] = build_local_methods(config, pools.target, logging.getLogger()).values()
    assert isinstance(method, VersionedMethod)
    pool = pools.start(CHUNKS["chunk16"], ROOMY_BLOCKS, {"eagle3": method})
    engine = pool.engine
    layers = (*method.info.hidden_layers, pools.target.num_layers)
    record = LearningRecord(pool.registry)
    tap = Tap(layers, engine.rounds.read_rows, record.count_tokens, places)
    engine.when_sessions_end(tap.take, layers)
    settings = LearnerSettings(str(heads["first"]), pools.target.path, str(folder), 1.0, 1000, 16, "float32", 64)
    loader = draft_loader(config, engine, pool.registry, logging.getLogger())
    command = (sys.executable, "-c", PRELUDE + script)
    learner = Learner(settings, tap, loader, record, logging.getLogger(), places, command)
    learner.start()
    try:
        yield Serving(pool, method, learner, record)
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
            is_newest = served.method._of[id(session)] is served.method._common.newest
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


A, B, C = "salt-of-alpha", "salt-of-beta", "salt-of-gamma"


def drafted_for(served: Serving, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The heads that the sessions of each salt get from now on."""
    found: dict[str, set[str]] = {salt: set() for salt in (A, B, C, "")}
    propose = served.method.propose

    def noting(sessions: Sequence[DraftSession]) -> list[Proposal]:
        for session in sessions:
            found[session.spec.cache_salt].add(served.method._of[id(session)].info.model)
        return propose(sessions)

    monkeypatch.setattr(served.method, "propose", noting)
    return found


def test_each_salt_is_drafted_for_by_its_own_head_with_the_same_bytes(
    pools: Pools,
    heads: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The process writes down which tokens it was given for which place, and offers a head for each place."""
    given = tmp_path / "given"
    script = f"""
offered = {{}}
while True:
    found = message()
    if "token_ids" not in found: continue
    with open({str(given)!r}, "a") as file:
        print(json.dumps([found["place"], found["token_ids"]]), file=file)
    if found["place"] not in offered:
        offered[found["place"]] = True
        offer([{str(heads["of-a"])!r}, {str(heads["of-b"])!r}][found["place"] - 1], found["place"])
"""
    caplog.set_level(logging.INFO)
    with serving(pools, heads, script, tmp_path, SaltPlaces(2, 10**6)) as served:
        served.salts = (A, B, C, "", A)
        drafted = drafted_for(served, monkeypatch)
        served.decode_until(lambda: {"of-a", "of-b"} <= drafted[A] | drafted[B], 120)
        assert served.method.info.version == 1
        metrics = generate_latest(served.pool.registry).decode()
        learning = served.record.now
        assert learning.num_salts == 2
        assert learning.num_private_tokens > 0
        assert served.metric("outrider:learner_salts", have="text") == 2
    assert drafted[C] | drafted[""] == {"first"}
    assert (drafted[A], drafted[B]) == ({"first", "of-a"}, {"first", "of-b"})
    tokens: dict[int, set[tuple[int, ...]]] = {1: set(), 2: set()}
    for line in given.read_text().splitlines():
        place, token_ids = json.loads(line)
        tokens[place].add(tuple(token_ids[:5]))
    beginnings = [prompt_of(key)[:5] for key in range(5)]
    assert tokens == {1: {beginnings[0], beginnings[4]}, 2: {beginnings[1]}}
    for words in (caplog.text, metrics, str(learning)):
        assert not [salt for salt in (A, B, C) if salt in words]


def test_a_place_that_is_lost_takes_its_head_and_texts_along(
    pools: Pools, heads: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trial ends, what is offered for it later is refused, and the process hears of it."""
    heard = tmp_path / "heard"
    script = f"""
message()
offer({str(heads["of-a"])!r}, 1)
while True:
    found = message()
    if "lost" in found:
        open({str(heard)!r}, "a").write(json.dumps(found))
        offer({str(heads["of-a"])!r}, 1)
"""
    with serving(pools, heads, script, tmp_path, SaltPlaces(1, 1000)) as served:
        served.salts = (A,)
        drafted = drafted_for(served, monkeypatch)
        served.decode_until(lambda: "of-a" in drafted[A])
        served.salts = (B,)
        served.decode_until(heard.exists)
        served.decode_until(lambda: "lost its place" in served.record.now.refusal)
        drafted[A].clear()
        served.salts = (A, B)
        served.decode(99)
        assert (drafted[A], drafted[B]) == ({"first"}, {"first"})
        assert json.loads(heard.read_text()) == {"lost": 1}
        learning = served.record.now
        assert (learning.num_salts, learning.num_salt_heads) == (1, 0)
        assert learning.num_rolled_back == 1


def test_heads_of_salts_serve_on_when_the_learner_is_started_again(
    pools: Pools, heads: dict[str, Path], tmp_path: Path
) -> None:
    """The second process is told which head serves whom; a head as good as the one before it has stood its trial."""
    told = tmp_path / "told"
    script = f"""
open({str(told)!r}, "a").write(json.dumps(settings["served"]) + "\\n")
if settings["served"]:
    while True: message()
message()
offer({str(heads["first"])!r}, 1)
outcome()
sys.exit(1)
"""
    with serving(pools, heads, script, tmp_path, SaltPlaces(1, 10**6)) as served:
        served.salts = (A,)
        served.decode_until(lambda: told.exists() and told.read_text().count("\n") == 2, 120)
        assert json.loads(told.read_text().splitlines()[1]) == [[1, str(heads["first"])]]
        assert served.record.now.num_salt_heads == 1
        assert served.method.info.version == 1
