"""vLLM's `--speculative-config` to the settings of the parts that its keys belong to here.

Not here: what the values must be, which each part checks itself when it starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.speculative_config import json_object
from shared.vllm_keys import IGNORED, OF_DRAFTER, OF_GATEWAY, OF_VERIFIER, given_keys


@dataclass(frozen=True)
class ServePlan:
    """gateway_config: its --speculative-config. ignored: what was passed over, in words."""

    draft_model: str
    gateway_config: str
    drafter_args: tuple[str, ...] = ()
    verifier_args: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def plan_serving(speculative_config: str) -> ServePlan:
    """Empty: nothing is drafted, as in vLLM. Raises ConfigError that names the key."""
    if not speculative_config:
        return ServePlan("", '{"method": "off"}')
    given = given_keys(json_object(speculative_config), "--speculative-config")
    return ServePlan(
        draft_model=str(given.get("model", "")),
        gateway_config=json.dumps({key: given[key] for key in OF_GATEWAY if key in given}),
        drafter_args=_flags(given, OF_DRAFTER),
        verifier_args=_flags(given, OF_VERIFIER),
        ignored=tuple(f"{key} of --speculative-config: {IGNORED[key]}" for key in given if key in IGNORED),
    )


def _flags(given: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, ...]:
    named = {f"--{key.replace('_', '-')}": given[key] for key in keys if key in given}
    return tuple(part for flag, value in named.items() for part in (flag, str(value)))
