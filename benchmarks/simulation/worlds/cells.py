"""The cells of benchmarks/held_out.py: worlds that no figure of the draft policy was tuned on.

Costs are those of benchmarks/results/costs.json, reshaped; what is accepted comes from text models (text.py). A new
group is a function that yields cells, and an entry in _GROUPS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.simulation.costs import Costs, Table
from benchmarks.simulation.local_drafts import DraftPrices
from benchmarks.simulation.session import Link
from benchmarks.simulation.worlds.text import NEVER, Acceptance
from benchmarks.simulation.worlds.world import Method, Server, World, run_world
from outrider.verifier_service.timing.step_costs import StepCosts, staircase

MODEL = Acceptance(easy=(0.9,), hard=(0.45,), easy_run=16.0, hard_run=8.0)
HEAD = Acceptance(easy=(0.85, 0.8, 0.75, 0.7, 0.65), hard=(0.5, 0.4, 0.3, 0.25, 0.2), easy_run=12.0, hard_run=8.0)
NGRAM = Acceptance(easy=(0.9,), hard=(0.25,), easy_run=10.0, hard_run=14.0, proposed=0.5)
SAMPLED = Acceptance(easy=(0.65, 0.6), hard=(0.3, 0.25), easy_run=12.0, hard_run=12.0)
# seconds of a proposal; next to nothing; suffix lookups take about 0.03 ms for a session
LOOKUP = DraftPrices(((1, 0.00003), (64, 0.0005)), 0.00003, one_forward=True, reads=False)
# Published acceptance of drafters of 8B models in chat: EAGLE-3 2.4 to 2.7 tokens a round at 5 drafted, block heads 3.5
# (DFlash, DSpark); and that of models/smollm2-eagle3 on held-out chat (docs/models.md).
EAGLE_8B, BLOCK_8B, EAGLE_SMALL = Acceptance((0.65,)), Acceptance((0.73,)), Acceptance((0.59, 0.56, 0.55))
SMALL_SAMPLED = Acceptance((0.5, 0.47, 0.45))
# (rows, times a forward of one row): SmolLM2-135M in 4 bits on two cores with AVX-512, and a step of its head there
_SMALL_ROWS = ((1, 1.0), (2, 1.09), (4, 1.28), (6, 1.51), (8, 1.81), (12, 2.5), (16, 3.32), (64, 13.0))
_SMALL_HEAD = ((1, 0.2), (2, 0.25), (4, 0.35), (8, 0.6), (16, 1.4), (64, 1.6))
SHAPES = ("staircase", "flat-then-steep", "cheap-rows", "costly-rows")
_PROMPT_ROWS = 64
_NUM_TOKENS = 64
# streams; plain decoding's capacity for arrivals is that of as many
_CAPACITY_STREAMS = 16
# seconds; warm-up and measurement of the capacity
_CAPACITY_WARM_UP_S, _CAPACITY_S = 3.0, 12.0
# rounds of plain decoding before the measurement, by sessions: _SESSION_ROUNDS / sessions within these
_FEWEST_ROUNDS, _MOST_ROUNDS = 500, 2000
_SESSION_ROUNDS = 8000
# ratio; measured rounds to those before
MEASURED = 2.0


@dataclass(frozen=True)
class Cell:
    group: str
    name: str
    world: World


def cells(costs: Costs, scale: float = 1.0) -> list[Cell]:
    """scale: of simulated time."""
    return [cell for group in _GROUPS for cell in group(costs, scale)]


def model_prices(costs: Costs, factor: float = 1.0) -> DraftPrices:
    """Returns prices of a draft model that takes `factor` times as long as the measured one."""
    step = tuple((rows, factor * seconds) for rows, seconds in costs.draft_step)
    return DraftPrices(step, factor * costs.draft_fixed_s)


def reshaped(costs: Costs, shape: str, factor: float = 1.0) -> Costs:
    """Returns costs with another table of forwards; factor: of all its seconds."""
    table = costs.verifier_step
    one_s = table[0][1]
    if shape == "staircase":
        table = tuple(staircase(table))
    elif shape == "flat-then-steep":
        steps = ((1, 1.0), (16, 1.0), (32, 2.2), (64, 5.0), (256, 22.0))
        table = tuple((rows, one_s * times) for rows, times in steps)
    elif shape == "gpu-like":
        steps = ((1, 1.0), (32, 1.0), (64, 1.4), (128, 2.2), (256, 4.0))
        table = tuple((rows, one_s * times) for rows, times in steps)
    elif shape == "cheap-rows":
        table = steeper(table, 0.25)
    elif shape == "costly-rows":
        table = steeper(table, 4.0)
    return dataclasses.replace(costs, verifier_step=tuple((rows, factor * seconds) for rows, seconds in table))


def steeper(table: Table, factor: float) -> Table:
    """Returns a table in which rows beyond the first add the factor times as much."""
    one_s = table[0][1]
    return tuple((rows, one_s + factor * (seconds - one_s)) for rows, seconds in table)


def plain_round_s(costs: Costs, num_sessions: float) -> float:
    """Returns the round time of plain decoding, all sessions in one forward."""
    forward_s = StepCosts(costs.verifier_step).seconds(num_sessions) + (num_sessions - 1) * costs.verifier_session_s
    return forward_s + costs.step_gap_s + num_sessions * costs.step_gap_per_session_s


def warm_up_rounds(num_sessions: float, session_rounds: float, fewest: float, most: float) -> float:
    return min(most, max(fewest, session_rounds / num_sessions))


def _world(servers: tuple[Server, ...], kinds: tuple[Acceptance, ...], scale: float, num_sessions: float = 0) -> World:
    """num_sessions: about the number that are open; 0: the servers' streams."""
    num_sessions = num_sessions or max(server.load for server in servers)
    round_s = max(plain_round_s(server.costs, num_sessions) for server in servers)
    rounds = scale * warm_up_rounds(num_sessions, _SESSION_ROUNDS, _FEWEST_ROUNDS, _MOST_ROUNDS)
    return World(servers, kinds, _NUM_TOKENS, _PROMPT_ROWS, rounds * round_s, MEASURED * rounds * round_s)


def _streams(costs: Costs, prices: DraftPrices, kind: Acceptance, num_streams: int, scale: float) -> World:
    return _world((Server(costs, prices, num_streams),), (kind,), scale)


def _sessions(costs: Costs, scale: float) -> Iterator[Cell]:
    prices = model_prices(costs)
    for num_streams in (1, 2, 4, 8, 16, 32):
        for name, of_method, kind in (("model", prices, MODEL), ("ngram", LOOKUP, NGRAM), ("wrong", prices, NEVER)):
            yield Cell("sessions", f"{name}-{num_streams}", _streams(costs, of_method, kind, num_streams, scale))


def _answers(costs: Costs, scale: float) -> Iterator[Cell]:
    for num_tokens in (16, 64, 400):
        for name, prices, kind in (("model", model_prices(costs), MODEL), ("ngram", LOOKUP, NGRAM)):
            world = dataclasses.replace(_streams(costs, prices, kind, 8, scale), num_tokens=num_tokens)
            yield Cell("answers", f"{name}-{num_tokens}-tokens", world)


def capacity(costs: Costs) -> float:
    """Tokens a second of plain decoding."""
    world = _streams(costs, LOOKUP, NEVER, _CAPACITY_STREAMS, 1.0)
    world = dataclasses.replace(world, warm_up_s=_CAPACITY_WARM_UP_S, seconds=_CAPACITY_S)
    return run_world(world, 0)[0].tokens_per_s


def _arrivals(costs: Costs, scale: float) -> Iterator[Cell]:
    tokens_per_s = capacity(costs)
    for share in (0.3, 0.7, 0.95):
        for name, prices, kind in (("model", model_prices(costs), MODEL), ("ngram", LOOKUP, NGRAM)):
            rate = share * tokens_per_s / _NUM_TOKENS
            world = _world((Server(costs, prices, rate, is_rate=True),), (kind,), scale, num_sessions=8)
            yield Cell("arrivals", f"{name}-{share:g}", world)


def _shapes(costs: Costs, scale: float) -> Iterator[Cell]:
    for shape in SHAPES:
        for num_streams in (4, 16):
            world = _streams(reshaped(costs, shape), model_prices(costs), MODEL, num_streams, scale)
            yield Cell("shapes", f"{shape}-{num_streams}", world)


def _verifiers(costs: Costs, scale: float) -> Iterator[Cell]:
    """Two behind one gateway: of unequal load; of two machines, one three times slower, with cheap rows where the other
    one has costly rows; and with requests of two kinds, for one of which drafts are never right, or less often.
    """
    prices, slow_prices = model_prices(costs), model_prices(costs, 3.0)
    fast, slow = reshaped(costs, "costly-rows"), reshaped(costs, "cheap-rows", factor=3.0)
    for name, kind in (("model", MODEL), ("head", HEAD)):
        loads = tuple(Server(costs, prices, num_streams) for num_streams in (1, 5))
        yield Cell("verifiers", f"{name}-1+5", _world(loads, (kind,), scale))
        machines = (Server(fast, prices, 4), Server(slow, slow_prices, 4))
        yield Cell("verifiers", f"{name}-two-machines", _world(machines, (kind,), scale))
    for name, other in (("wrong", NEVER), ("sampled", SAMPLED)):
        requests = tuple(Server(costs, prices, 4, kinds=(kind,)) for kind in (other, MODEL))
        yield Cell("verifiers", f"{name}+model", _world(requests, (MODEL,), scale))


def _changes(costs: Costs, scale: float) -> Iterator[Cell]:
    for num_streams in (4, 16):
        for name, kind, later in (("bad", MODEL, NEVER), ("good", NEVER, MODEL)):
            world = _streams(costs, model_prices(costs), kind, num_streams, scale)
            yield Cell("changes", f"turns-{name}-{num_streams}", dataclasses.replace(world, later=(later,)))


def _mixed(costs: Costs, scale: float) -> Iterator[Cell]:
    for num_streams in (4, 16):
        servers = (Server(costs, model_prices(costs), num_streams),)
        yield Cell("mixed", f"greedy+sampled-{num_streams}", _world(servers, (MODEL, SAMPLED), scale))


def _stretches(costs: Costs, scale: float) -> Iterator[Cell]:
    """Some hundred tokens that are easy to draft, then some hundred of which drafts lose."""
    costs = reshaped(costs, "costly-rows")
    for num_streams in (1, 4):
        for num_tokens in (150, 400):
            kind = Acceptance((0.9,), (0.15,), easy_run=num_tokens, hard_run=num_tokens)
            world = dataclasses.replace(
                _streams(costs, model_prices(costs, 2.0), kind, num_streams, scale),
                num_tokens=400,
                warm_up_s=30.0 * scale,
            )
            yield Cell("stretches", f"{num_tokens}-tokens-{num_streams}", world)


def _beginnings(costs: Costs, scale: float) -> Iterator[Cell]:
    """Measured: the first 3,000 tokens of one stream whose drafts lose, with one method, and with three, of which one
    pays or none; and the first 800 after a turn for the worse.
    """
    costs = reshaped(costs, "costly-rows")
    prices, round_s = model_prices(costs, 2.0), plain_round_s(costs, 1)
    sampled = Acceptance((0.25,))
    cold = dataclasses.replace(_streams(costs, prices, sampled, 1, scale), warm_up_s=0.0, seconds=3000 * round_s)
    yield Cell("beginnings", "cold-sampled", cold)
    lookups = tuple(Method(name, LOOKUP, dataclasses.replace(NGRAM, easy=(0.4,))) for name in ("suffix", "ngram"))
    for name, model in (("cold-three", sampled), ("cold-three-head", HEAD)):
        server = Server(costs, prices, 1, others=lookups)
        yield Cell("beginnings", name, dataclasses.replace(cold, servers=(server,), kinds=(model,)))
    turn = dataclasses.replace(cold, warm_up_s=3000 * round_s, seconds=800 * round_s, changes_at=0.0)
    for name, kind in (("model", MODEL), ("head", HEAD)):
        yield Cell("beginnings", f"turn-{name}", dataclasses.replace(turn, kinds=(kind,), later=(sampled,)))


def _gpu_like(costs: Costs, scale: float) -> Iterator[Cell]:
    """Rows are free up to 32; a step of a head takes 8 % of a forward, one layer and the output layer of 32 layers."""
    costs = reshaped(costs, "gpu-like")
    step_s = 0.08 * costs.verifier_step[0][1]
    chain = DraftPrices(((1, step_s), (32, step_s), (256, 4 * step_s)), 0.1 * step_s)
    block = dataclasses.replace(chain, one_forward=True)
    methods = (
        ("eagle3-8b", chain, EAGLE_8B),
        ("block-8b", block, BLOCK_8B),
        ("eagle3-small", chain, EAGLE_SMALL),
        ("lookup", LOOKUP, NGRAM),
    )
    for num_streams in (1, 8, 32):
        for name, prices, kind in methods:
            yield Cell("gpu-like", f"{name}-{num_streams}", _streams(costs, prices, kind, num_streams, scale))


def _joins(costs: Costs, scale: float) -> Iterator[Cell]:
    """Measured: the first 400 rounds after three or fifteen streams have come to one that has been served for long,
    with a head and two lookups at the prices of SmolLM2-135M's.
    """
    one_s = costs.verifier_step[0][1]
    costs = dataclasses.replace(costs, verifier_step=tuple((rows, one_s * times) for rows, times in _SMALL_ROWS))
    head = DraftPrices(tuple((rows, one_s * times) for rows, times in _SMALL_HEAD), 0.0)
    lookups = tuple(Method(name, LOOKUP, NGRAM) for name in ("suffix", "ngram"))
    for num_joining in (3, 15):
        for name, kind in (("head", EAGLE_SMALL), ("sampled", SMALL_SAMPLED)):
            server = Server(costs, head, 1, others=lookups, num_joining=num_joining)
            round_s = plain_round_s(costs, 1 + num_joining)
            world = dataclasses.replace(
                _world((server,), (kind,), scale),
                warm_up_s=2000 * plain_round_s(costs, 1),
                seconds=400 * round_s,
                num_tokens=96,
            )
            yield Cell("joins", f"{name}-1+{num_joining}", world)


def _remote(costs: Costs, scale: float) -> Iterator[Cell]:
    for num_streams in (1, 4):
        world = _streams(costs, model_prices(costs), MODEL, num_streams, scale)
        yield Cell("remote", f"5ms-{num_streams}", dataclasses.replace(world, link=Link(0.005, 0.5)))


_GROUPS = (
    _sessions,
    _answers,
    _arrivals,
    _shapes,
    _verifiers,
    _changes,
    _mixed,
    _stretches,
    _beginnings,
    _joins,
    _remote,
    _gpu_like,
)
