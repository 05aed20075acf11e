"""Costs for tests of the simulation: round figures, of no machine."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.simulation.costs import Costs, Domain, Table

FLAT: Table = ((1, 0.02), (256, 0.02))
RISING: Table = ((1, 0.02), (8, 0.022), (16, 0.03), (64, 0.08), (256, 0.3))
MIXED = (8, 0, 3, 2, 8, 1, 5, 8, 2, 4)


def make_costs(
    *,
    verifier_step: Table = FLAT,
    draft_step: Table = ((1, 0.001), (64, 0.001)),
    draft_fixed_s: float = 0.0,
    accepted: Sequence[int] = MIXED,
    step_gap_s: float = 0.0,
    trip_s: float = 0.0,
    verifier_session_s: float = 0.0,
    host_round_s: float = 0.0,
    host_draft_s: float = 0.0,
    beside: tuple[float, float] = (1.0, 1.0),
) -> Costs:
    domain = Domain(8, (100,), (tuple(accepted),))
    return Costs(
        verifier_step=verifier_step,
        verifier_session_s=verifier_session_s,
        host_round_s=host_round_s,
        host_draft_s=host_draft_s,
        verifier_beside_drafter=beside[0],
        drafter_beside_verifier=beside[1],
        step_gap_s=step_gap_s,
        step_gap_per_session_s=0.0,
        draft_step=draft_step,
        draft_fixed_s=draft_fixed_s,
        verifier_trip_s=trip_s,
        drafter_trip_s=trip_s,
        request_s=0.0,
        cached_prompt_rows=8,
        domains={"code": domain},
        measured={},
    )
