"""Input of the simulation: costs and acceptance as benchmarks/simulation/record.py measured them.

Nothing here has a default value: a figure that was not measured cannot be simulated with.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.shared.errors import ConfigError

DEFAULT_PATH = Path(__file__).parents[1] / "results" / "costs.json"
Table = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Domain:
    """Prompts of a kind, at temperature 0.

    num_prompt_tokens, accepted: one entry per request; `accepted` holds, round by round, how many of
    `num_draft_tokens` were accepted. A shorter draft would have had the same number accepted, up to its own length.
    """

    num_draft_tokens: int
    num_prompt_tokens: tuple[int, ...]
    accepted: tuple[tuple[int, ...], ...]

    def tokens_per_round(self, num_draft_tokens: int) -> float:
        """Mean over all rounds of a draft of that length and the target's own token: E of docs/scaling.md."""
        rounds = [min(num_draft_tokens, accepted) for request in self.accepted for accepted in request]
        return 1.0 + sum(rounds) / len(rounds)


@dataclass(frozen=True)
class Costs:
    """Seconds, on a machine that does nothing else.

    verifier_step, draft_step: (rows of a forward, seconds), ascending; the target's of one session, of which each
    further one adds verifier_session_s: it has keys of its own. draft_fixed_s: of a proposal beyond its forwards.
    step_gap_s: between a forward's end and the next one's beginning, per session and for all.
    """

    verifier_step: Table
    verifier_session_s: float
    step_gap_s: float
    step_gap_per_session_s: float
    draft_step: Table
    draft_fixed_s: float
    # There and back between gateway and service on one machine, beyond the service's own time.
    verifier_trip_s: float
    drafter_trip_s: float
    # On one machine, in rounds with drafts: how many times as long a forward, and a proposal, take as alone. Each finds
    # caches that the other one has emptied.
    verifier_beside_drafter: float
    drafter_beside_verifier: float
    # Of all cores of the machine: what gateway, client and Redis take for a round of a session, and for its draft.
    host_round_s: float
    host_draft_s: float
    # What a request takes beyond its prefill until its first token is at the client.
    request_s: float
    # Of the last block of a prompt that is in the prefix cache.
    cached_prompt_rows: int
    domains: dict[str, Domain]
    measured: dict[str, Any]


def save_costs(costs: Costs, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(costs), indent=1) + "\n")


def load_costs(path: Path) -> Costs:
    """Raises ConfigError that says how to make the file, or what is wrong with it."""
    try:
        raw = json.loads(path.read_text())
        domains = {
            name: Domain(
                domain["num_draft_tokens"],
                tuple(domain["num_prompt_tokens"]),
                tuple(tuple(request) for request in domain["accepted"]),
            )
            for name, domain in raw.pop("domains").items()
        }
        verifier_step, draft_step = (
            tuple((rows, seconds) for rows, seconds in raw.pop(name)) for name in ("verifier_step", "draft_step")
        )
        return Costs(**raw, verifier_step=verifier_step, draft_step=draft_step, domains=domains)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; `python -m benchmarks.simulation.record` makes it") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a file of costs: {error!r}") from None
