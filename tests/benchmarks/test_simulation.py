"""The simulation against closed forms: plain decoding, the speed-up formula, queues; and that a seed settles it."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from statistics import mean, pstdev

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import simulate as command
from benchmarks.simulation.costs import Domain, load_costs, save_costs
from benchmarks.simulation.fleet import Arrivals, Fleet, LeastLoaded, Scenario, simulate
from benchmarks.simulation.session import Link
from outrider.shared.errors import ConfigError
from tests.benchmarks.simulated_costs import MIXED, RISING, make_costs

ONE = Scenario(1, 1, "off", 1.0, Arrivals.STREAMS, num_tokens=2000, seconds=200.0, cached_prompts=True)


def test_plain_decoding_takes_a_forward_and_a_gap_per_token() -> None:
    costs = make_costs(step_gap_s=0.005)
    outcome = simulate(ONE, costs)
    assert outcome.tokens_per_s == pytest.approx(1 / 0.025, rel=0.01)
    assert outcome.verifier_busy == pytest.approx(0.8, rel=0.01)


@pytest.mark.parametrize("rtt_ms", [0, 5, 100])
@pytest.mark.parametrize("length", [1, 4, 8])
def test_one_stream_is_as_fast_as_the_formula_says(length: int, rtt_ms: int) -> None:
    """S = E / (1 + n c + r), Leviathan et al. 2023 with a round trip: E counted from what was recorded."""
    costs = make_costs()
    outcome = simulate(dataclasses.replace(ONE, method=f"fixed:{length}", link=Link(rtt_ms * 1e-3)), costs)
    tokens = 1 + sum(min(length, accepted) for accepted in MIXED) / len(MIXED)
    speedup = tokens / (1 + length * 0.001 / 0.02 + rtt_ms * 1e-3 / 0.02)
    assert outcome.tokens_per_s * 0.02 == pytest.approx(speedup, rel=0.03)
    assert outcome.tokens_per_round == pytest.approx(tokens, rel=0.03)


def test_jitter_keeps_the_mean() -> None:
    method = dataclasses.replace(ONE, method="fixed:4")
    steady, shaken = (
        simulate(dataclasses.replace(method, link=Link(0.05, jitter)), make_costs()).tokens_per_s
        for jitter in (0.0, 0.5)
    )
    assert shaken == pytest.approx(steady, rel=0.03)


def test_sessions_that_decode_together_share_a_forward() -> None:
    outcome = simulate(dataclasses.replace(ONE, load=8.0), make_costs(verifier_step=RISING))
    assert outcome.tokens_per_s == pytest.approx(8 / 0.022, rel=0.02)


def test_sessions_that_draft_are_waited_for() -> None:
    """BatchGathering waits for those that are about to come back: one batch of 4, not two of 2 that take turns."""
    outcome = simulate(dataclasses.replace(ONE, method="fixed:4", load=4.0), make_costs(trip_s=0.001))
    tokens = 1 + sum(min(4, accepted) for accepted in MIXED) / len(MIXED)
    together = 4 * tokens / (0.02 + 4 * 0.001 + 0.002)
    assert outcome.tokens_per_s > 0.9 * together


def test_services_on_one_machine_share_its_cores() -> None:
    """Two verifiers that always have sessions: on one machine each forward takes twice as long."""
    two = dataclasses.replace(ONE, num_verifiers=2, load=8.0, seconds=50.0)
    apart, together = (
        simulate(dataclasses.replace(two, one_machine=shared), make_costs()).tokens_per_s for shared in (False, True)
    )
    assert apart == pytest.approx(16 / 0.02, rel=0.01)
    assert together == pytest.approx(8 / 0.02, rel=0.01)


def test_sessions_of_a_forward_have_a_price_of_their_own() -> None:
    outcome = simulate(dataclasses.replace(ONE, load=8.0), make_costs(verifier_session_s=0.001))
    assert outcome.tokens_per_s == pytest.approx(8 / 0.027, rel=0.02)


def test_gateway_and_client_take_cores_on_one_machine_alone() -> None:
    costs = make_costs(host_round_s=0.005, host_draft_s=0.002)
    apart, together = (
        simulate(dataclasses.replace(ONE, one_machine=shared), costs).tokens_per_s for shared in (False, True)
    )
    assert apart == pytest.approx(1 / 0.02, rel=0.01)
    # Beside a forward of 20 ms its 5 ms take half of the machine for 10 ms.
    assert together == pytest.approx(1 / 0.025, rel=0.01)
    drafted = [
        simulate(dataclasses.replace(ONE, method="fixed:4", one_machine=True), each)
        for each in (costs, make_costs(host_round_s=0.005))
    ]
    seconds = [outcome.tokens_per_round / outcome.tokens_per_s for outcome in drafted]
    assert seconds[0] - seconds[1] == pytest.approx(0.002, rel=0.1)


def test_drafter_and_verifier_slow_each_other_down_on_one_machine_alone() -> None:
    costs = make_costs(beside=(1.2, 3.0))
    round_s = {}
    for method, one_machine in (("fixed:4", True), ("fixed:4", False), ("off", True)):
        outcome = simulate(dataclasses.replace(ONE, method=method, one_machine=one_machine), costs)
        round_s[method, one_machine] = outcome.tokens_per_round / outcome.tokens_per_s
    assert round_s["fixed:4", True] == pytest.approx(1.2 * 0.02 + 3.0 * 4 * 0.001, rel=0.02)
    assert round_s["fixed:4", False] == pytest.approx(0.02 + 4 * 0.001, rel=0.02)
    assert round_s["off", True] == pytest.approx(0.02, rel=0.02), "a verifier that nobody drafts for finds its weights"


def test_one_drafter_for_many_verifiers_is_a_queue() -> None:
    """A drafter that takes 40 ms for a proposal, whoever shares it, cannot be asked more often than that."""
    costs = make_costs(draft_step=((1, 0.010), (64, 0.10)))
    many = dataclasses.replace(ONE, num_verifiers=16, method="fixed:4", seconds=30.0)
    few, enough = (simulate(dataclasses.replace(many, num_drafters=count), costs) for count in (1, 16))
    assert few.tokens_per_s < 0.8 * enough.tokens_per_s
    assert few.drafter_busy > 0.9


def test_a_drafter_that_is_far_too_slow_is_not_waited_for() -> None:
    """600 ms for a proposal: one timeout of 500 ms, then the session decodes alone, and gets its tokens."""
    costs = make_costs(draft_step=((1, 0.15), (64, 0.15)))
    outcome = simulate(dataclasses.replace(ONE, method="fixed:4"), costs)
    assert outcome.num_timeouts > 0
    assert outcome.drafted_share == 0.0
    assert outcome.tokens_per_s > 0.5 / 0.02


def test_auto_does_not_draft_where_the_way_is_too_long() -> None:
    near, far = (simulate(dataclasses.replace(ONE, method="auto", link=Link(rtt)), make_costs()) for rtt in (0.0, 0.2))
    assert near.tokens_per_s > 1.5 / 0.02
    assert far.drafted_share < 0.1
    assert far.tokens_per_s > 0.9 / 0.02


def test_without_drafters_every_method_decodes_alone() -> None:
    for method in ("auto", "fixed:4"):
        outcome = simulate(dataclasses.replace(ONE, num_drafters=0, method=method), make_costs())
        assert outcome.drafted_share == 0.0
        assert outcome.tokens_per_s > 0.95 / 0.02


def test_requests_come_at_the_rate_that_was_asked_for_and_burst_where_wanted() -> None:
    def gaps(arrivals: Arrivals) -> list[float]:
        fleet = Fleet(Scenario(4, 0, "off", 5.0, arrivals), make_costs())
        return [fleet._until_next_s() for _ in range(20000)]

    spread = {}
    for arrivals in (Arrivals.POISSON, Arrivals.BURSTY):
        found = gaps(arrivals)
        assert mean(found) == pytest.approx(1 / 20, rel=0.1)
        spread[arrivals] = pstdev(found) / mean(found)
    assert spread[Arrivals.POISSON] == pytest.approx(1.0, abs=0.1)
    assert spread[Arrivals.BURSTY] == pytest.approx(3.0, abs=0.4)


def test_a_queue_before_a_prefill_is_that_of_pollaczek_and_khinchine() -> None:
    """Requests of two tokens with a prompt of 100 rows: a forward of 20 ms serves whoever waits, so the wait for the
    first token lies between no wait and that of an M/D/1 queue at the same rate.
    """
    rate = 10.0
    scenario = Scenario(1, 0, "off", rate, num_tokens=2, seconds=300.0)
    fleet = Fleet(scenario, make_costs())
    fleet.run()
    busy = 2 * rate * 0.02
    longest = 0.02 + busy * 0.02 / (2 * (1 - busy))
    assert 0.02 <= mean(fleet.tally.first_token_s) <= longest


def test_a_seed_settles_everything() -> None:
    scenario = Scenario(3, 2, "auto", 4.0, Arrivals.BURSTY, link=Link(0.005, 0.5), seconds=20.0)
    first, again, other = (
        dataclasses.replace(simulate(dataclasses.replace(scenario, seed=seed), make_costs()), cpu_s=0.0)
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_the_least_loaded_is_who_has_least() -> None:
    rng = random.Random(0)
    members = [object() for _ in range(7)]
    loads, pool = dict.fromkeys(members, 0), LeastLoaded(members)
    for _ in range(500):
        assert loads[pool.least()] == min(loads.values())
        member = rng.choice(members)
        change = 1 if loads[member] == 0 else rng.choice((-1, 1))
        loads[member] += change
        pool.add(member, change)
        assert pool.load(member) == loads[member]


def test_tokens_per_round_are_counted_from_the_record() -> None:
    domain = Domain(8, (10, 10), ((0, 4, 8), (2,)))
    assert domain.tokens_per_round(1) == 1 + 3 / 4
    assert domain.tokens_per_round(8) == 1 + 14 / 4


def test_costs_come_back_from_their_file(tmp_path: Path) -> None:
    save_costs(make_costs(), tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json") == make_costs()


def test_what_is_no_file_of_costs_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"benchmarks\.simulation\.record"):
        load_costs(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a file of costs"):
        load_costs(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "fixed:0"}, "fixed:N"),
        ({"method": "tree"}, "off, auto or fixed:N"),
        ({"load": 0.0}, "above 0"),
        ({"domain": "poetry"}, "recorded are code"),
        ({"method": "fixed:12"}, "up to 8 draft tokens"),
    ],
)
def test_scenarios_that_cannot_be_simulated_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(dataclasses.replace(ONE, **change), make_costs())  # type: ignore[arg-type]


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    save_costs(make_costs(), tmp_path / "costs.json")
    app, cli = CliRunner(), typer.Typer()
    cli.command()(command.main)
    common = ["--costs", str(tmp_path / "costs.json"), "--seconds", "5", "--load", "2", "--method", "off,fixed:4"]
    table = app.invoke(cli, common)
    assert table.exit_code == 0
    assert "of off" in table.output
    lines = app.invoke(cli, [*common, "--json"]).output.splitlines()
    assert [json.loads(line)["method"] for line in lines] == ["off", "fixed:4"]
    wrong = app.invoke(cli, ["--costs", str(tmp_path / "none.json")])
    assert wrong.exit_code == 2
