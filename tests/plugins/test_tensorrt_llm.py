"""TensorRT-LLM's drafter against the real drafter service. fake_tensorrt_llm.py has the executor's side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.fake_runner import cycle
from tests.plugins.fake_tensorrt_llm import Executor, Ranks, Request, modules
from tests.plugins.served_drafter import Method, drafter, until, with_ids
from tests.ports import nobodys_port

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    with modules(made):
        yield made


def made_drafter(*addresses: str, **given: Any) -> Any:
    from outrider.tensorrt_llm import Drafter

    said = {"method": "ngram", "deadline_ms": 10_000, "vocab_size": 100, "max_draft_len": 4, **given}
    return Drafter("org/big", drafters=list(addresses), **said)


@contextmanager
def executing(*addresses: str, wait: bool = True, **given: Any) -> Iterator[Executor]:
    executor = Executor(made_drafter(*addresses, **given))
    try:
        links = executor.drafter._drafts.fleet.links
        if wait:
            until(lambda: all(link.is_up for link in links), "a drafter is not there")
        yield executor
    finally:
        executor.drafter.close()


def requests(count: int, length: int = 120) -> list[Request]:
    return [Request(number, cycle(3 + 2 * number, 5 + number % 5, length + number), 20) for number in range(count)]


def test_drafts_are_the_service_s(ranks: Ranks) -> None:
    with drafter() as served, executing(served.address) as executor:
        batch = requests(4)
        executor.finish(batch)
        assert all(request.is_done for request in batch)
        assert executor.num_accepted > 0.9 * executor.num_drafted
        assert executor.num_steps < 30, "100 tokens each by 4 + 1 a step"


def test_the_draft_length_that_it_is_set_to_counts(ranks: Ranks) -> None:
    """TensorRT-LLM lowers it for large batches (`draft_len_schedule`)."""
    with drafter() as served, executing(served.address) as executor:
        executor.drafter.max_total_draft_tokens = 2
        executor.finish(requests(1))
        assert executor.num_drafted > 0


@pytest.mark.parametrize(
    "spoil",
    [
        with_ids(lambda entry: -1 - entry),
        with_ids(lambda entry: 100 + entry),
        with_ids(lambda entry: (entry + 1) % 100),
        lambda proposal: replace(proposal, token_ids=proposal.token_ids * 50),
        lambda proposal: replace(proposal, parents=(-1,) * len(proposal.token_ids)),
    ],
    ids=["negative ids", "ids outside", "wrong ids", "too long", "a tree"],
)
def test_a_wrong_or_hostile_drafter_costs_speed_only(ranks: Ranks, spoil: Any) -> None:
    method = Method()
    method.spoil = spoil
    with drafter(method) as served, executing(served.address) as executor:
        batch = requests(3, 60)
        executor.finish(batch)
        assert all(request.is_done for request in batch)


def test_a_killed_drafter(ranks: Ranks) -> None:
    with drafter() as one, drafter() as other, executing(one.address, other.address) as executor:
        batch = requests(4, 400)
        for _ in range(4):
            executor.step(batch)
        assert (one.engine.num_sessions, other.engine.num_sessions) == (2, 2)
        one.kill()
        until(lambda: not executor.drafter._drafts.fleet.links[0].is_up, "the loss is not noticed")
        executor.step(batch)
        assert other.engine.num_sessions == 4
        other.kill()
        executor.finish(batch)


def test_no_drafter_at_all(ranks: Ranks) -> None:
    with executing(f"127.0.0.1:{nobodys_port()}", wait=False) as executor:
        executor.finish(requests(2, 40))
        assert executor.num_drafted == 0


def test_an_exception_is_logged(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Request):
        def get_tokens(self, beam: int) -> list[int]:
            raise RuntimeError("boom")

    with drafter() as served, executing(served.address) as executor:
        executor.finish([Broken(1, cycle(3), 20)])
    assert "no drafts for this step" in caplog.text


def test_ranks_have_the_drafts_of_the_first(ranks: Ranks) -> None:
    with drafter() as served, executing(served.address) as executor:
        first, other = requests(1)[0], requests(1)[0]
        others = Executor(made_drafter(served.address))
        for _ in range(8):
            ranks.rank = 0
            executor.step([first])
            ranks.rank = 1
            others.step([other])
            assert other.py_draft_tokens == first.py_draft_tokens
        assert others.num_accepted == executor.num_accepted > 0
        assert "_drafts" not in vars(others.drafter), "it has asked nobody"
        assert served.engine.num_sessions == 1


def test_wrong_options_are_named_before_a_model_is_loaded(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="drafters"):
        made_drafter()
    with pytest.raises(ValueError, match="'deadlin_ms'"):
        made_drafter("h:1", deadlin_ms=4)


def test_the_bound_of_requests_is_tensorrt_llm_s_to_keep(ranks: Ranks) -> None:
    assert made_drafter("h:1", max_concurrency=8).max_concurrency == 8
    assert made_drafter("h:1").max_concurrency is None


def test_the_number_of_ids_is_the_config_s(ranks: Ranks) -> None:
    from outrider.tensorrt_llm import Drafter

    assert Drafter(str(ROOT / "models/demo-target"), max_draft_len=4, drafters=["h:1"])._vocab_size == 4096
    with pytest.raises(ValueError, match="give vocab_size"):
        Drafter("no/such-model", max_draft_len=4, drafters=["h:1"])
