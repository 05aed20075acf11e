"""The simulations that the sizing rule stands on, and the rule itself in closed form.

Not here: how they are drawn (plots.py) and where the tables go (report.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.simulation.costs import Costs
from benchmarks.simulation.fleet import Arrivals, Outcome, Scenario, simulate
from benchmarks.simulation.session import Link
from outrider.verifier_service.timing.step_costs import StepCosts

RTTS_MS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
NUM_VERIFIERS = 16
NUM_SHARED = (1, 2, 4, 8, 16)
STREAMS = 4
LOADS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.6, 2.0)
FLEETS = (1, 10, 100, 1000)
FLEET_LOAD = 0.25
FLEET_SECONDS = 60.0
_LENGTHS = range(1, 9)
Table = list[list[str]]


@dataclass(frozen=True)
class Point:
    scenario: Scenario
    outcome: Outcome
    plain: Outcome

    @property
    def of_off(self) -> float:
        return self.outcome.tokens_per_s / self.plain.tokens_per_s


def _points(costs: Costs, scenarios: list[Scenario], plain: Scenario) -> list[Point]:
    base = simulate(plain, costs)
    return [Point(scenario, simulate(scenario, costs), base) for scenario in scenarios]


def remote_drafting(costs: Costs, seconds: float) -> dict[str, list[Point]]:
    """Returns rates by draft, one stream at a verifier with a drafter of its own, over the round-trip time."""

    def scenario(method: str, domain: str, rtt_ms: float) -> Scenario:
        link = Link(rtt_ms * 1e-3)
        return Scenario(
            1, 1, method, 1.0, Arrivals.STREAMS, link, domain, seconds=seconds, cached_prompts=True, warm_up_s=20.0
        )

    found = {}
    for domain in costs.domains:
        for method in ("auto", "fixed:8") if domain == "code" else ("auto",):
            plain = scenario("off", domain, 0.0)
            scenarios = [scenario(method, domain, rtt_ms) for rtt_ms in RTTS_MS]
            found[f"{method.replace('fixed:', '')}, {domain}"] = _points(costs, scenarios, plain)
    return found


def shared_drafters(costs: Costs, seconds: float) -> dict[str, list[Point]]:
    """Returns rates by method, 16 verifiers with 4 streams each, over the number of drafters that they share."""

    def scenario(method: str, num_drafters: int) -> Scenario:
        return Scenario(
            NUM_VERIFIERS, num_drafters, method, STREAMS, Arrivals.STREAMS, seconds=seconds, cached_prompts=True
        )

    plain = scenario("off", 1)
    return {
        method: _points(costs, [scenario(method, count) for count in NUM_SHARED], plain)
        for method in ("fixed:4", "fixed:8", "auto")
    }


def loads(costs: Costs, seconds: float) -> dict[str, list[Point]]:
    """Returns rates by method and arrivals, 8 verifiers and 8 drafters, over the requests a second."""
    found = {}
    for arrivals in (Arrivals.POISSON, Arrivals.BURSTY):
        for method in ("off", "auto"):
            found[f"{method}, {arrivals}"] = [
                _points(costs, [Scenario(8, 8, method, load, arrivals, seconds=2 * seconds)], _plain(load, seconds))[0]
                for load in LOADS
            ]
    return found


def _plain(load: float, seconds: float) -> Scenario:
    return Scenario(8, 0, "off", load, seconds=2 * seconds)


def fleets(costs: Costs, seconds: float) -> list[Point]:
    """The simulated seconds that the documentation states, unless a quick look was asked for."""
    points = []
    for count in FLEETS:
        common = {"load": FLEET_LOAD, "seconds": min(FLEET_SECONDS, 2 * seconds)}
        scenario = Scenario(count, max(1, count // 4), "auto", **common)  # type: ignore[arg-type]
        points += _points(costs, [scenario], Scenario(count, 0, "off", **common))  # type: ignore[arg-type]
    return points


def plain_s(costs: Costs) -> float:
    """Seconds of a plain round of one stream."""
    return costs.verifier_step[0][1] + costs.step_gap_s + costs.step_gap_per_session_s


def draft_s(costs: Costs, num_sessions: int, num_draft_tokens: int) -> float:
    return costs.draft_fixed_s + num_draft_tokens * StepCosts(costs.draft_step).seconds(num_sessions)


def round_s(costs: Costs, num_sessions: int, num_draft_tokens: int) -> float:
    """Returns the round time of sessions that draft and verify together, without a round-trip time."""
    forward_s = StepCosts(costs.verifier_step).seconds(num_sessions * (1 + num_draft_tokens))
    forward_s += (num_sessions - 1) * costs.verifier_session_s
    gap_s = costs.step_gap_s + num_sessions * costs.step_gap_per_session_s
    return forward_s + gap_s + draft_s(costs, num_sessions, num_draft_tokens) + trips_s(costs)


def trips_s(costs: Costs) -> float:
    return costs.verifier_trip_s + costs.drafter_trip_s


def break_even_s(costs: Costs, domain: str) -> tuple[float, int]:
    """Round-trip time up to which drafting pays at one stream, and the length that bears it."""
    tokens = costs.domains[domain].tokens_per_round
    best = [(tokens(length) * plain_s(costs) - round_s(costs, 1, length), length) for length in _LENGTHS]
    return max(best)


def costs_table(costs: Costs) -> Table:
    verifier, draft = (dict(table) for table in (costs.verifier_step, costs.draft_step))
    return [
        ["what", "seconds"],
        ["forward of the target by rows", ", ".join(f"{rows}: {1e3 * s:.1f}" for rows, s in verifier.items()) + " ms"],
        ["each further session of that forward", f"{costs.verifier_session_s * 1e3:.2f} ms"],
        ["step of the draft model by rows", ", ".join(f"{rows}: {1e3 * s:.2f}" for rows, s in draft.items()) + " ms"],
        ["a proposal beyond its steps", f"{costs.draft_fixed_s * 1e3:.2f} ms"],
        ["between two forwards, and per session", f"{costs.step_gap_s * 1e3:.2f}, "
         f"{costs.step_gap_per_session_s * 1e3:.2f} ms"],
        ["to the verifier and back, to the drafter and back", f"{costs.verifier_trip_s * 1e3:.2f}, "
         f"{costs.drafter_trip_s * 1e3:.2f} ms"],
        ["all cores, for gateway, client and Redis, per round and its draft", f"{costs.host_round_s * 1e3:.2f}, "
         f"{costs.host_draft_s * 1e3:.2f} ms"],
        ["beside each other on one machine a forward, a proposal", f"{costs.verifier_beside_drafter:.2f}, "
         f"{costs.drafter_beside_verifier:.2f} times as long"],
    ]  # fmt: skip


def break_even_table(costs: Costs) -> Table:
    rows = [["domain", "tokens per round with 2, 4, 8 drafts", "best gain without delay", "pays up to a round trip of"]]
    for name, domain in costs.domains.items():
        tokens = domain.tokens_per_round
        gain = max(tokens(length) * plain_s(costs) / round_s(costs, 1, length) for length in _LENGTHS)
        limit_s, length = break_even_s(costs, name)
        at = f"{limit_s * 1e3:.0f} ms ({length} drafts)" if limit_s > 0 else "never"
        rows.append([name, ", ".join(f"{tokens(count):.2f}" for count in (2, 4, 8)), f"{gain:.2f}", at])
    return rows


def drafters_table(costs: Costs, found: dict[str, list[Point]]) -> Table:
    """Returns a table of the simulation and of the rule: one drafter bears 1 / (its share of a round) verifiers."""
    rows = [["method", "rule: verifiers per drafter", *(f"1 for {NUM_VERIFIERS // count}" for count in NUM_SHARED)]]
    for method, points in found.items():
        length = points[0].scenario.fixed_length
        rule = round_s(costs, STREAMS, length) / draft_s(costs, STREAMS, length) if length else 0.0
        cells = [f"{point.of_off:.2f} (busy {point.outcome.drafter_busy:.0%})" for point in points]
        rows.append([method, f"{rule:.1f}" if rule else "", *cells])
    return rows


def load_table(found: dict[str, list[Point]]) -> Table:
    rows = [["method, arrivals", *(f"{load:g}/s" for load in LOADS)]]
    for name, points in found.items():
        cells = []
        for point in points:
            outcome = point.outcome
            cells.append(f"{outcome.first_token_s['p99']:.1f} s, {outcome.token_s['p50'] * 1e3:.0f} ms")
        rows.append([name, *cells])
    return rows


def fleets_table(points: list[Point]) -> Table:
    rows = [["verifiers", "drafters", "tokens/s", "per token, p50", "without drafts", "events", "simulated in"]]
    for point in points:
        scenario, outcome = point.scenario, point.outcome
        rows.append(
            [
                f"{scenario.num_verifiers:,}",
                f"{scenario.num_drafters:,}",
                f"{outcome.tokens_per_s:,.0f}",
                f"{outcome.token_s['p50'] * 1e3:.1f} ms",
                f"{point.plain.token_s['p50'] * 1e3:.1f} ms",
                f"{outcome.num_events:,}",
                f"{outcome.cpu_s:.1f} s",
            ]
        )
    return rows
