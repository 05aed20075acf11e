"""vLLM's proposer over the real drafter service: what it drafts, and that nothing a drafter does reaches vLLM.

vLLM itself is not installed here: fake_runner.py has its side. docs/outgrow-one-machine.md has what was seen with it.
"""

from __future__ import annotations

import itertools
import logging
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from outrider.drafter_service.tenants import Tenants
from outrider.plugins import fleet, vllm
from outrider.plugins.vllm import Proposer
from outrider.shared.api_keys import KeyRing, key_line
from outrider.shared.messages import Proposal
from outrider.shared.tls import server_tls
from tests.certificates import Authority
from tests.plugins.fake_runner import MAX_MODEL_LEN, FakeRunner, Request, cycle, vllm_config
from tests.plugins.served_drafter import Method, drafter, until, with_ids
from tests.ports import nobodys_port, server_port

ROOT = Path(__file__).parents[2]
# milliseconds; a deadline that drafters are to miss
SHORT_MS = 60


def requests(count: int, length: int = 120) -> list[Request]:
    return [Request(cycle(3 + 2 * number, 5 + number % 5, length + number), 20) for number in range(count)]


@contextmanager
def proposing(*addresses: str, wait: bool = True, **options: Any) -> Iterator[Proposer]:
    proposer = Proposer(vllm_config(addresses, **options))
    try:
        if wait:
            until(lambda: all(link.is_up for link in proposer._fleet.links), "a drafter is not there")
        yield proposer
    finally:
        proposer.close()


def test_drafts_are_the_service_s_and_the_text_is_the_target_s() -> None:
    with drafter() as served, proposing(served.address) as proposer:
        runner, batch = FakeRunner(proposer), requests(4)
        runner.finish(batch)
        assert all(request.output == request.text[20:] for request in batch)
        # 100 tokens each by 4 + 1 a step, the last few steps with less room
        assert runner.num_accepted > 0.9 * runner.num_drafted
        assert runner.num_steps < 30


def test_rows_move_prompts_are_alike_and_requests_pause() -> None:
    """A request keeps its session through all of it: one text sent, then only what is new."""
    opened: list[int] = []

    class Counted(Method):
        def open(self, session: Any) -> None:
            opened.append(len(session.token_ids))
            super().open(session)

    with drafter(Counted()) as served, proposing(served.address) as proposer:
        runner, batch = FakeRunner(proposer), [*requests(5), *requests(2)]  # two pairs with the same text
        shuffled = random.Random(4)
        while not all(request.is_done for request in batch):
            is_first = runner.num_steps == 0
            here = [request for request in batch if not request.is_done and (is_first or shuffled.random() < 0.8)]
            shuffled.shuffle(here)
            if here:
                runner.step(here)
        assert all(request.output == request.text[20:] for request in batch)
        assert opened == [20] * len(batch)
        assert runner.num_accepted > 0.9 * runner.num_drafted > 0


def test_ended_sessions_are_closed_while_vllm_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_UNSEEN_S", 0.2)
    monkeypatch.setattr(vllm, "_SWEEP_S", 0.05)
    with drafter() as served, proposing(served.address) as proposer:
        FakeRunner(proposer).finish(requests(6, 40))
        until(lambda: served.engine.num_sessions == 0, "sessions are still open")
        assert len(proposer._rows) == 0


def _explode(_: Proposal) -> Proposal:
    raise ValueError("boom")


FAULTS: dict[str, Callable[[Proposal], Proposal]] = {
    "negative ids": with_ids(lambda entry: -1 - entry),
    "ids outside": with_ids(lambda entry: 100 + entry),
    "huge ids": with_ids(lambda _: 2**31 - 1),
    "wrong ids": with_ids(lambda entry: (entry + 1) % 100),
    "too long": lambda proposal: replace(proposal, token_ids=proposal.token_ids * 50),
    "a tree": lambda proposal: replace(proposal, parents=(-1,) * len(proposal.token_ids)),
    "another place": lambda proposal: replace(proposal, base_len=proposal.base_len + 1),
    "an exception": _explode,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_or_hostile_drafter_costs_speed_only(fault: str) -> None:
    method = Method()
    with drafter(method) as served, proposing(served.address, deadline_ms=SHORT_MS) as proposer:
        runner, batch = FakeRunner(proposer), requests(3, 60)
        for _ in range(3):
            runner.step(batch)
        method.spoil = FAULTS[fault]
        runner.finish(batch)
        assert all(request.output == request.text[20:] for request in batch)


def test_a_stopped_drafter_costs_one_late_step_and_is_asked_again_when_it_is_back() -> None:
    method = Method()
    with drafter(method) as served, proposing(served.address, deadline_ms=500) as proposer:
        runner, batch = FakeRunner(proposer), requests(2, 400)
        for _ in range(4):
            runner.step(batch)
        method.gate.clear()
        waits = []
        for _ in range(12):
            began = time.monotonic()
            runner.step(batch)
            waits.append(time.monotonic() - began)
        assert sum(wait > 0.4 for wait in waits) == 1, waits
        method.gate.set()
        drafted = runner.num_drafted
        until(lambda: runner.step(batch) or runner.num_drafted > drafted, "it is not asked again")
        assert not any(request.is_done for request in batch)
        runner.finish(batch)
        assert all(request.output == request.text[20:] for request in batch)


def test_a_late_draft_is_not_taken_for_a_later_text() -> None:
    """It would follow other tokens, and count as the answer of a session that is waited for."""
    method = Method()
    with drafter(method) as served, proposing(served.address, deadline_ms=SHORT_MS) as proposer:
        runner, batch = FakeRunner(proposer), requests(2, 400)
        for _ in range(4):
            runner.step(batch)
        method.gate.clear()
        runner.step(batch)
        runner.step(batch)  # one token more; the drafter is not asked
        num_before = method.num_proposals
        method.gate.set()
        until(lambda: method.num_proposals >= num_before + 2, "the late drafts are not made")
        until(lambda: not any(s.owes for s in proposer._fleet._sessions.values()), "they do not come")
        assert proposer._fleet._round.answers == {}
        runner.finish(batch)
        assert all(request.output == request.text[20:] for request in batch)


def test_a_draft_that_is_a_little_late_costs_a_little() -> None:
    """The drafter is asked again after as long as it was late, not after a fixed time of many steps."""
    method = Method()
    with drafter(method) as served, proposing(served.address, deadline_ms=SHORT_MS) as proposer:
        runner, batch = FakeRunner(proposer), requests(2, 400)
        for _ in range(4):
            runner.step(batch)
        [state] = proposer._fleet._states.values()
        method.gate.clear()
        began = time.monotonic()
        runner.step(batch)
        method.gate.set()
        until(lambda: state.late_since is None, "the late drafts do not come")
        came = time.monotonic()
        assert state.num_late == 1
        assert state.asks_at - came <= came - began - SHORT_MS / 1e3


def test_a_killed_drafter_s_sessions_are_opened_again_when_it_is_back() -> None:
    with drafter() as served, proposing(served.address) as proposer:
        runner, batch = FakeRunner(proposer), requests(3, 400)
        for _ in range(4):
            runner.step(batch)
        served.kill()
        for _ in range(4):
            runner.step(batch)
        assert not any(request.draft for request in batch)
        served.start()
        [link] = proposer._fleet.links
        until(lambda: link.is_up and link.generation == 2, "no connection")
        for _ in range(4):
            runner.step(batch)
        assert all(request.draft for request in batch)
        runner.finish(batch)
        assert all(request.output == request.text[20:] for request in batch)


def test_sessions_are_spread_and_move_to_another_drafter() -> None:
    with drafter() as one, drafter() as other, proposing(one.address, other.address) as proposer:
        runner, batch = FakeRunner(proposer), requests(6, 400)
        for _ in range(4):
            runner.step(batch)
        assert (one.engine.num_sessions, other.engine.num_sessions) == (3, 3)
        one.kill()
        until(lambda: not proposer._fleet.links[0].is_up, "the loss is not noticed")
        for _ in range(3):
            runner.step(batch)
        assert other.engine.num_sessions == 6
        assert all(request.draft for request in batch), "each was opened there by one message"
        runner.finish(batch)
        assert all(request.output == request.text[20:] for request in batch)


def test_a_lost_batch_is_opened_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its texts would keep vLLM's thread busy otherwise."""
    monkeypatch.setattr(fleet, "_MAX_OPENED", 70)
    with drafter() as served, proposing(served.address) as proposer:
        runner, batch = FakeRunner(proposer), requests(9, 200)
        held = []
        for _ in range(4):
            runner.step(batch)
            held.append(len(proposer._fleet._sessions))
        assert held == [3, 6, 9, 9], "of 20 tokens each"


def test_no_drafter_at_all() -> None:
    with proposing(f"127.0.0.1:{nobodys_port()}", wait=False) as proposer:
        runner, batch = FakeRunner(proposer), requests(2, 40)
        began = time.monotonic()
        runner.finish(batch)
        assert time.monotonic() - began < 10 < proposer._options.deadline_ms / 1e3 * runner.num_steps
        assert all(request.output == request.text[20:] for request in batch)


def test_the_end_of_the_context_is_left_alone() -> None:
    with drafter() as served, proposing(served.address) as proposer:
        runner, request = FakeRunner(proposer), Request(cycle(3, 5, MAX_MODEL_LEN), MAX_MODEL_LEN - 12)
        room: list[int] = []
        while not request.is_done:
            runner.step([request])
            assert request.prompt_len + len(request.output) + len(request.draft) <= MAX_MODEL_LEN
            room.append(len(request.draft))
        assert 0 < max(room)
        assert room[-1] == 0


def test_a_full_drafter_drafts_for_those_it_has() -> None:
    with drafter(max_num_seqs=2) as served, proposing(served.address) as proposer:
        runner, batch = FakeRunner(proposer), requests(4)
        for _ in range(4):
            runner.step(batch)
        assert sum(bool(request.draft) for request in batch) == 2
        runner.finish(batch)
        assert all(request.output == request.text[20:] for request in batch)


def test_another_vocabulary_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    method = Method(vocab_size=777, model="small")
    with drafter(method) as served, proposing(served.address, wait=False) as proposer:
        until(lambda: caplog.text, "nothing is logged")
        runner, batch = FakeRunner(proposer), requests(2, 40)
        runner.finish(batch)
        assert runner.num_drafted == 0
    assert "'big' (100 ids" in caplog.text
    assert "'small' (777 ids" in caplog.text


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text(key_line("ann", "or-ann", max_concurrent=1))
    with drafter(tenants=Tenants(KeyRing(str(file)))) as served:
        monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
        with proposing(served.address, wait=False):
            until(lambda: "UNAUTHENTICATED" in caplog.text, "nothing is refused")
        monkeypatch.setenv("OUTRIDER_API_KEY", "or-ann")
        with proposing(served.address) as proposer:
            runner, batch = FakeRunner(proposer), requests(3)
            for _ in range(4):
                runner.step(batch)
            assert served.engine.num_sessions == 1, "the key's quota"


def test_tls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path, "fleet")
    issued = authority.issue("drafter", dns_names=("localhost",))
    own = authority.issue("vllm", dns_names=("vllm",))
    given = {"tls_ca_file": authority.ca_file, "tls_cert_file": own.cert_file, "tls_key_file": own.key_file}
    port, tls = server_port(), server_tls(issued.cert_file, issued.key_file, authority.ca_file)
    address = f"localhost:{port}"
    with drafter(port=port, tls=tls):
        with proposing(address, **given) as proposer:
            runner = FakeRunner(proposer)
            runner.finish(requests(1, 60))
            assert runner.num_accepted
        with proposing(address, wait=False, tls_ca_file=authority.ca_file) as proposer:
            until(lambda: "UNAVAILABLE" in caplog.text or "cannot be reached" in caplog.text, "nothing is refused")
            assert not proposer._fleet.links[0].is_up


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "drafters"),
        ({"drafters": "host:1"}, "list of host:port"),
        ({"drafters": ["host"]}, "list of host:port"),
        ({"drafters": ["h:1"], "deadlin_ms": 4}, "'deadlin_ms'"),
        ({"drafters": ["h:1"], "deadline_ms": "4"}, "outrider.deadline_ms"),
        ({"drafters": ["h:1"], "deadline_ms": True}, "outrider.deadline_ms"),
        ({"drafters": ["h:1"], "deadline_ms": float("nan")}, "outrider.deadline_ms"),
        ({"drafters": ["h:1"], "auto_off": 1}, "outrider.auto_off"),
        ({"drafters": ["h:1"], "tls_cert_file": "a"}, "tls_key_file"),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], said: str) -> None:
    config = vllm_config(["h:1"])
    config.additional_config = {"outrider": given}
    with pytest.raises(ValueError, match=said):
        Proposer(config)


def test_a_draft_ends_where_it_is_unlikely() -> None:
    method = Method()
    shares = itertools.cycle([255, 204, 51, 255])

    def unsure(proposal: Proposal) -> Proposal:
        return replace(proposal, confidence=bytes(next(shares) for _ in proposal.token_ids))

    method.spoil = unsure
    with drafter(method) as served, proposing(served.address, min_confidence=0.5) as proposer:
        runner, batch = FakeRunner(proposer), requests(1)
        for _ in range(4):
            runner.step(batch)
        assert len(batch[0].draft) == 2, "1.0 * 0.8 is enough, 1.0 * 0.8 * 0.2 is not"


@pytest.mark.parametrize("module", ["outrider.vllm", "outrider.sglang", "outrider.transformers"])
def test_it_needs_grpc_protobuf_and_numpy_only(module: str) -> None:
    """Nor generated code, which refuses the older protobuf of an engine."""
    code = f"import sys, {module}; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.split())
    ours = {name for name in loaded if name.startswith("outrider.") and not name.startswith("outrider.plugins")}
    assert ours - {module, "outrider.shared", "outrider.shared.checkpoint"} == {
        "outrider.shared.checkpoint.tokenizer_digest"
    }
    names = {re.split(r"[^\w-]", entry)[0].replace("-", "_") for entry in distribution("outrider").requires or []}
    others = names - {"outrider", "grpcio", "protobuf", "numpy", "setuptools"}
    assert {"httpx", "redis", "torch", "transformers", "uvloop"} <= others
    assert loaded & {*others, "prometheus_client"} == set()
