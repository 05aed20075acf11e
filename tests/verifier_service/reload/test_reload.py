"""Other weights of the target while sessions run: every answer is of one set of weights, or ends by name."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from outrider.engine.certificate import Certificate
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.shared.errors import InvalidRequest, Overloaded, TargetReplaced, Unavailable
from outrider.shared.messages import Commit, LocalDrafts, weights_of
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.local_methods import build_local_methods, draft_loader
from outrider.verifier_service.reload.candidate import target_kind
from outrider.verifier_service.reload.reloader import TargetMetrics, TargetReloader
from outrider.verifier_service.reload.served_target import ServedTarget
from tests.grid.heads import save_random_head
from tests.verifier_service.drafting.other_weights import with_nan, with_noise
from tests.verifier_service.engine_client import (
    NUM_TOKENS,
    PARAMS,
    PROMPT,
    EngineShape,
    Session,
    generate,
    make_spec,
    plain_decoding,
    prompt_of,
    running_engine,
    save_llama,
    tokens_of,
)
from tests.verifier_service.served_target import decode

log = logging.getLogger(__name__)
NAMES = ("greedy", "greedy with penalties", "sampled", "hot")


@dataclass(frozen=True)
class Targets:
    """Two checkpoints of one config, and what plain decoding of each says."""

    folders: tuple[str, str]
    plain: tuple[Callable[[str, int], list[Commit]], Callable[[str, int], list[Commit]]]

    def answer(self, which: int, name: str, seed: int = 0) -> tuple[int, ...]:
        return tokens_of(self.plain[which](name, seed))


@pytest.fixture(scope="module")
def targets(checkpoint: Path, loaded: LoadedModel, certificate: Certificate, tmp_path_factory) -> Targets:  # type: ignore[no-untyped-def]
    other = with_noise(checkpoint, tmp_path_factory.mktemp("reload") / "other")
    plain = plain_decoding(load_model(str(other), dtype="float32"), certificate)
    return Targets((str(checkpoint), str(other)), (plain_decoding(loaded, certificate), plain))


@dataclass(frozen=True)
class Serving:
    engine: VerifierEngine
    served: ServedTarget
    reloader: TargetReloader
    registry: CollectorRegistry

    def count(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"outrider:target_{name}", labels)


@contextmanager
def serving(
    loaded: LoadedModel, certificate: Certificate, shape: EngineShape | None = None, heads: Sequence[Path] = ()
) -> Iterator[Serving]:
    config = VerifierConfig(
        model=loaded.path,
        dtype="float32",
        num_threads=1,
        allow_target_reload=True,
        local_draft_model=tuple(map(str, heads)),
        local_kv_cache_mb=16,
        block_size=4,
    )
    registry = CollectorRegistry()
    methods = build_local_methods(config, loaded, log)
    with running_engine(loaded, certificate, shape, methods) as engine:
        served = ServedTarget(target_kind(loaded, config))
        drafts = draft_loader(config, engine, registry, log)
        yield Serving(
            engine, served, TargetReloader(config, engine, served, drafts, TargetMetrics(registry), log), registry
        )


@pytest.fixture
def running(loaded: LoadedModel, certificate: Certificate) -> Iterator[Serving]:
    with serving(loaded, certificate) as found:
        yield found


def received(session: Session) -> tuple[int, ...]:
    """The tokens of a free run until its end, or until it was ended by name."""
    found: tuple[int, ...] = ()
    while len(found) < NUM_TOKENS:
        reply = session.replies.get(timeout=60)
        if isinstance(reply, Exception):
            assert isinstance(reply, TargetReplaced)
            break
        found += reply.token_ids
    return found


def test_an_answer_is_of_one_set_of_weights(running: Serving, targets: Targets) -> None:
    """The prompts are the same before and after, so that their prefixes are in the cache."""
    for which in (1, 0, 1):
        before, engine = 1 - which, running.engine
        assert targets.answer(which, "greedy") != targets.answer(before, "greedy")
        with (
            Session(engine, make_spec(PROMPT, PARAMS["greedy"])) as between,
            Session(engine, make_spec(prompt_of(1), PARAMS["sampled"])) as drawing,
        ):
            begun = tokens_of(between.step(0, max_new_tokens=7))
            assert begun == targets.answer(before, "greedy")[: len(begun)]
            drawing.submit(0, max_new_tokens=NUM_TOKENS)
            running.reloader.load(targets.folders[which], 0.0)
            between.submit(len(begun), max_new_tokens=NUM_TOKENS)
            with pytest.raises(TargetReplaced):
                between.collect()
            expected, found = targets.answer(before, "sampled", 1), received(drawing)
            assert found == expected[: len(found)]
        for name in NAMES:
            assert tokens_of(generate(engine, make_spec(PROMPT, PARAMS[name]))) == targets.answer(which, name)
    assert running.served.state.version == 4
    assert running.count("version") == 4
    assert running.count("reloads_total", outcome="taken") == 3


def test_running_sessions_end_on_their_weights_and_new_ones_wait(running: Serving, targets: Targets) -> None:
    engine, served = running.engine, running.served
    old = served.state.numerics
    with ThreadPoolExecutor() as pool, Session(engine, make_spec(PROMPT, PARAMS["hot"])) as session:
        output = tokens_of(session.step(0))
        reload = pool.submit(running.reloader.load, targets.folders[1], 600.0)
        while not (new := served.state.next_numerics):
            time.sleep(0.01)
        assert weights_of(new)
        assert weights_of(new) != weights_of(old)
        waiting = [pool.submit(lambda kind=kind: asyncio.run(served.admit(kind))) for kind in (new, None)]
        assert asyncio.run(served.admit(old)) == 1  # one that moves here from another verifier
        while len(output) < len(targets.answer(0, "hot")):
            output += tokens_of(session.step(len(output)))
        assert output == targets.answer(0, "hot")
        assert not reload.done()
        assert not any(wait.done() for wait in waiting)
        session.__exit__()
        assert reload.result(timeout=60).version == 2
        assert [wait.result(timeout=60) for wait in waiting] == [2, 2]
    assert running.count("reload_ended_sessions_total") == 0
    with pytest.raises(TargetReplaced):
        asyncio.run(served.admit(old))
    with pytest.raises(TargetReplaced):  # tokens of a gateway that does not say whose they are
        asyncio.run(served.admit(None, continues=True))
    with pytest.raises(Unavailable, match="the session needs numerics float32/cpu/other"):
        asyncio.run(served.admit("float32/cpu/other"))


def test_a_session_admitted_before_the_swap_does_not_open_after_it(running: Serving, targets: Targets) -> None:
    version = asyncio.run(running.served.admit(None))
    running.reloader.load(targets.folders[1], 0.0)
    session = Session(running.engine, make_spec(PROMPT, PARAMS["greedy"]))
    session.handle = running.engine.open(session.spec, session.replies.put, None, version)
    with pytest.raises(TargetReplaced):
        session.step(0)
    running.engine.check_integrity()
    assert running.engine._num_open == 0


def test_what_is_refused_leaves_the_weights_as_they_are(
    running: Serving, targets: Targets, tmp_path: Path, checkpoint: Path
) -> None:
    damaged = with_noise(checkpoint, tmp_path / "damaged")
    [file] = damaged.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    later_rope = with_noise(checkpoint, tmp_path / "rope")
    config = json.loads((later_rope / "config.json").read_text())
    (later_rope / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    other_ends = with_noise(checkpoint, tmp_path / "ends")
    (other_ends / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    refused = {
        with_nan(checkpoint, tmp_path / "nan"): "not finite",
        save_llama(tmp_path / "deeper", num_layers=3): "not of the served target's config: .*layers 3, here 2",
        later_rope: "rms_norm_eps 0.5",
        other_ends: "outputs end with .7, 2., here with .2,.",
        damaged: "cannot be read",
        tmp_path / "nowhere": "nowhere",
        Path(""): "config|nowhere|folder",
    }
    with Session(running.engine, make_spec(PROMPT, PARAMS["sampled"])) as session:
        output = tokens_of(session.step(0, max_new_tokens=5))
        for folder, words in refused.items():
            with pytest.raises(InvalidRequest, match=words):
                running.reloader.load(str(folder), 0.0)
        output += tokens_of(session.step(len(output), max_new_tokens=NUM_TOKENS))
    assert output == targets.answer(0, "sampled")
    assert running.served.state.version == 1
    assert running.count("reloads_total", outcome="refused") == len(refused)
    with pytest.raises(InvalidRequest, match="drain_s"):
        running.reloader.load(targets.folders[1], -1.0)


def test_the_weights_that_serve_end_no_session(running: Serving, targets: Targets) -> None:
    with Session(running.engine, make_spec(PROMPT, PARAMS["greedy"])) as session:
        output = tokens_of(session.step(0, max_new_tokens=5))
        assert running.reloader.load(targets.folders[0], 0.0).version == 1
        output += tokens_of(session.step(len(output), max_new_tokens=NUM_TOKENS))
    assert output == targets.answer(0, "greedy")
    assert running.count("reloads_total", outcome="same") == 1


def test_the_weights_before_are_let_go(running: Serving, targets: Targets) -> None:
    running.reloader.load(targets.folders[1], 0.0)
    generate(running.engine, make_spec(PROMPT, PARAMS["greedy"]))
    model = weakref.ref(running.engine.loaded.model)
    assert model() is not None
    running.reloader.load(targets.folders[0], 0.0)
    assert model() is None


def test_one_load_at_a_time(running: Serving, targets: Targets) -> None:
    with ThreadPoolExecutor() as pool, Session(running.engine, make_spec(PROMPT, PARAMS["greedy"])) as session:
        session.step(0)
        reload = pool.submit(running.reloader.load, targets.folders[1], 600.0)
        while not running.served.state.next_numerics:
            time.sleep(0.01)
        with pytest.raises(Overloaded):
            running.reloader.load(targets.folders[1], 0.0)
        session.__exit__()
        assert reload.result(timeout=60).version == 2


def test_heads_draft_with_the_new_weights(
    loaded: LoadedModel, certificate: Certificate, targets: Targets, tmp_path: Path
) -> None:
    """As many drafts are accepted after a reload as where the new weights served from the start."""
    head = tmp_path / "eagle3"
    save_random_head("eagle3", loaded, head)
    specs = [make_spec(prompt_of(seed), PARAMS["greedy"], stream_key=seed) for seed in range(4)]
    local = LocalDrafts("eagle3", 4)
    with serving(load_model(targets.folders[1], dtype="float32"), certificate, heads=[head]) as fresh:
        expected = decode(fresh.engine, specs, local)
    with serving(loaded, certificate, heads=[head]) as found:
        before = decode(found.engine, specs, local)
        found.reloader.load(targets.folders[1], 0.0)
        assert decode(found.engine, specs, local) == expected
        versions = {info.name: info.version for info in found.engine.local_methods}
        assert versions["eagle3"] == 2
    assert sum(outcome.num_draft_tokens for outcome in expected) > 100
    assert before != expected


@pytest.mark.parametrize("seconds", [0.0, 3.0])
def test_twenty_reloads_under_load(running: Serving, targets: Targets, seconds: float) -> None:
    """Each answer is the whole of one target's, or its beginning and an end by name."""
    over = threading.Event()
    failures: list[str] = []
    whole: Counter[int] = Counter()  # by the weights, 0 or 1
    cut: Counter[int] = Counter()
    answers = {
        (which, name, seed): targets.answer(which, name, seed) for which in (0, 1) for name in NAMES for seed in (0, 1)
    }

    def stream(number: int) -> None:
        name, seed, found = NAMES[number % 4], number % 2, ()
        while not over.is_set():
            version = asyncio.run(running.served.admit(None))
            session = Session(running.engine, make_spec(prompt_of(seed), PARAMS[name]))
            session.handle = running.engine.open(session.spec, session.replies.put, None, version)
            expected, found = answers[(version + 1) % 2, name, seed], ()
            try:
                while len(found) < len(expected):
                    found += tokens_of(session.step(len(found), max_new_tokens=9))
                whole[(version + 1) % 2] += 1
            except TargetReplaced:
                cut[(version + 1) % 2] += 1
            except Exception as error:
                failures.append(repr(error))
            finally:
                session.__exit__()
            if found != expected[: len(found)]:
                failures.append(f"{name}: {found} is not of version {version}: {expected}")

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    try:
        num_reloads = 20 if not seconds else 2
        for number in range(num_reloads):
            assert running.reloader.load(targets.folders[(number + 1) % 2], seconds).version == number + 2
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert set(whole) == {0, 1}
    assert bool(cut) == (seconds == 0.0)
