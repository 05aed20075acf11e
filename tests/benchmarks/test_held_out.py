"""The held-out benchmark's worlds against closed forms, and its command."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import held_out as command
from benchmarks.simulation.costs import DEFAULT_PATH, Costs, load_costs
from benchmarks.simulation.local_drafts import DraftPrices
from benchmarks.simulation.rounds import Drafted, SessionRound
from benchmarks.simulation.verifier_auto import DRAFT_METHOD
from benchmarks.simulation.worlds import world
from benchmarks.simulation.worlds.cells import LOOKUP, Cell, cells, reshaped
from benchmarks.simulation.worlds.random_worlds import random_cells
from benchmarks.simulation.worlds.text import NEVER, NUM_TOKENS, Acceptance, Text
from benchmarks.simulation.worlds.world import Server, World, run_world
from outrider.shared.errors import ConfigError
from outrider.verifier_service.timing.gathering import LastRound
from tests.benchmarks.simulated_costs import RISING, make_costs

COSTS = make_costs(verifier_step=RISING, draft_step=((1, 0.001), (64, 0.0073)), draft_fixed_s=0.002)
PRICES = DraftPrices(COSTS.draft_step, COSTS.draft_fixed_s)
FALLING = Acceptance((0.9, 0.7, 0.5))


def one(kind: Acceptance, num_streams: int, *, costs: Costs = COSTS, prices: DraftPrices = PRICES) -> World:
    return World((Server(costs, prices, num_streams),), (kind,), 1000, 1, warm_up_s=5.0, seconds=120.0)


@pytest.mark.parametrize("num_streams", [1, 4])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_fixed_length_brings_its_tokens_over_its_seconds(length: int, num_streams: int) -> None:
    """E(k) / T(k): all sessions draft together, k forwards of the draft model, then one of all their rows. Of the draft
    model's first forward, sessions whose draft was accepted in whole have two rows."""
    served = run_world(one(FALLING, num_streams), length)[0]
    tokens = FALLING.tokens_per_round(length)
    whole = math.prod((FALLING.easy + FALLING.easy[-1:] * length)[:length])
    draft_row_s = 0.0001
    draft_s = 0.002 + length * (0.001 + (num_streams - 1) * draft_row_s) + num_streams * whole * draft_row_s
    rows = num_streams * (1 + length)
    forward_s = 0.02 + (rows - 1) * 0.002 / 7 if rows <= 8 else {12: 0.026, 24: 0.03 + 8 * 0.05 / 48}[rows]
    assert served.tokens_per_round == pytest.approx(tokens, rel=0.02)
    assert served.tokens_per_s == pytest.approx(num_streams * tokens / (draft_s + forward_s), rel=0.02)
    assert served.token_rate == pytest.approx(served.tokens_per_s / num_streams, rel=0.001)


def test_plain_decoding_brings_a_token_of_everyone_per_forward() -> None:
    served = run_world(one(FALLING, 8), 0)[0]
    assert served.tokens_per_s == pytest.approx(8 / 0.022, rel=0.02)
    assert served.drafted_share == 0.0


def test_a_lookup_that_often_finds_nothing_costs_and_brings_its_share() -> None:
    kind = dataclasses.replace(FALLING, proposed=0.4)
    served = run_world(one(kind, 1, prices=LOOKUP), 3)[0]
    tokens = 1.0 + 0.4 * (FALLING.tokens_per_round(3) - 1.0)
    seconds = 0.00006 + 0.02 + 0.4 * 3 * 0.002 / 7
    assert served.drafted_share == pytest.approx(0.4, abs=0.02)
    assert served.tokens_per_s == pytest.approx(tokens / seconds, rel=0.02)


def test_requests_that_arrive_by_chance_get_what_plain_decoding_can_give() -> None:
    """Below capacity everything that arrives is served; far below, everyone is nearly alone."""
    server = Server(make_costs(), PRICES, 0.25, is_rate=True)
    cell = World((server,), (FALLING,), 20, 1, warm_up_s=100.0, seconds=6000.0)
    served = run_world(cell, 0)[0]
    assert served.tokens_per_s == pytest.approx(5.0, rel=0.1)
    assert served.token_rate == pytest.approx(50.0, rel=0.02)


def test_easy_text_comes_in_runs_and_shorter_drafts_find_more_of_it() -> None:
    """Where only the text decides, a draft of one passes a run of r easy tokens in about r / 2 rounds."""
    text = Text(Acceptance((1.0,), (0.0,), easy_run=8.0, hard_run=2.0), seed=3)
    first_accepted = {}
    for length in (1, 8):
        position, rounds, hits = 0, 0, 0
        while position < NUM_TOKENS:
            accepted = text.accepted(position, length, 0.0)
            position, rounds, hits = position + accepted + 1, rounds + 1, hits + (accepted > 0)
        first_accepted[length] = hits / rounds
    assert first_accepted[1] > first_accepted[8] + 0.1


def test_a_drafter_changes_when_it_is_time() -> None:
    text = Text(Acceptance((1.0,)), 0, later=NEVER, changes_at_s=10.0)
    assert text.accepted(5, 4, 9.9) == 4
    assert text.accepted(5, 4, 10.0) == 0


def test_every_variant_meets_the_same_requests_and_a_seed_settles_everything() -> None:
    cell = random_cells("random-a", load_costs(DEFAULT_PATH), 3, 0.1)[2]
    assert run_world(cell.world, None) == run_world(cell.world, None)
    assert run_world(cell.world, 2) != run_world(dataclasses.replace(cell.world, seed=1), 2)


def test_auto_stops_drafting_what_is_never_accepted() -> None:
    cell = dataclasses.replace(one(NEVER, 4), num_tokens=100)
    plain, auto = (run_world(cell, length)[0] for length in (0, None))
    assert auto.token_rate > 0.97 * plain.token_rate


class DecidesEachRound:
    """What a policy at the verifier looks like: nothing is known of a session before its first round."""

    def __init__(self) -> None:
        self.num_rounds = 0

    def opened(self, session: Drafted) -> None:
        session.num_wanted = 0

    def decide(self, sessions: Iterable[Drafted]) -> None:
        for session in sessions:
            session.method, session.num_wanted = DRAFT_METHOD, 2

    def observe(self, members: Sequence[SessionRound], last_round: LastRound, num_open: int) -> None:
        self.num_rounds += 1
        assert all(member.times.batch_sessions == len(members) for member in members)


def test_a_policy_at_the_verifier_decides_for_the_round_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = DecidesEachRound()
    monkeypatch.setattr(world, "VerifierLengths", lambda *_: lengths)
    cell = one(FALLING, 4)
    assert run_world(cell, None) == run_world(cell, 2)
    assert lengths.num_rounds > 1000


def test_verifiers_are_scored_alone() -> None:
    """Without drafts they have nothing to do with each other: each is as fast as by itself."""
    slow = reshaped(COSTS, "measured", factor=3.0)
    servers = (Server(COSTS, PRICES, 2), Server(slow, PRICES, 2))
    both = World(servers, (FALLING,), 1000, 1, warm_up_s=5.0, seconds=100.0)
    rates = [score.rates[0] for score in command.run_cell(Cell("verifiers", "two", both), [0])]
    assert rates[0] == pytest.approx(3 * rates[1], rel=0.02)


def test_named_cells_have_names_of_their_own() -> None:
    names = [cell.name for cell in cells(load_costs(DEFAULT_PATH))]
    assert len(names) == len(set(names)) > 40


def test_the_command_prints_scores_and_refuses_what_it_does_not_know() -> None:
    cli = typer.Typer()
    cli.command()(command.main)
    shown = CliRunner().invoke(cli, ["--cells", "wrong-1", "--lengths", "1", "--scale", "0.05"])
    assert shown.exit_code == 0
    assert "of best" in shown.output
    wrong = CliRunner().invoke(cli, ["--cells", "poetry"])
    assert wrong.exit_code == 2
    assert "no cell or group" in wrong.output


def test_unknown_cells_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match="groups are sessions"):
        command._choose(load_costs(DEFAULT_PATH), "poetry", 1, 1.0)
