"""The gateway's `--speculative-config`: parsed by the gateway, and by whatever starts the services, before loading."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from outrider.shared.draft_policy.draft_methods import AUTO, known_method
from outrider.shared.errors import ConfigError
from outrider.shared.request_params import MAX_SPECULATIVE_TOKENS
from outrider.shared.vllm_keys import FLAGS_ELSEWHERE


@dataclass(frozen=True)
class SpeculativeConfig:
    """The keys of `--speculative-config` (vLLM's). Not here: the draft checkpoint, which is a drafter setting."""

    method: str = AUTO
    num_speculative_tokens: int = 5
    token_tree: bool = False


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Parses the JSON; `method` becomes our name of it.

    Raises ConfigError that names the key, and its service if it is another's.
    """
    if not text.strip():
        return SpeculativeConfig()
    raw = json_object(text)
    known = {key.replace("-", "_"): value for key, value in raw.items()}
    for key in known.keys() & FLAGS_ELSEWHERE.keys():
        raise ConfigError(f"--speculative-config: give {key} as {FLAGS_ELSEWHERE[key]}")
    allowed = SpeculativeConfig.__dataclass_fields__.keys()
    for key in known.keys() - allowed:
        raise ConfigError(f"--speculative-config: unknown key {key!r}; known are {', '.join(allowed)}")
    config = SpeculativeConfig(**known)
    if not isinstance(config.method, str):
        raise ConfigError("--speculative-config: method must be text")
    if not isinstance(config.token_tree, bool):
        raise ConfigError("--speculative-config: token_tree must be true or false")
    tokens = config.num_speculative_tokens
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= MAX_SPECULATIVE_TOKENS:
        raise ConfigError(
            f"--speculative-config: num_speculative_tokens must be a whole number from 1 to {MAX_SPECULATIVE_TOKENS}"
        )
    return replace(config, method=known_method(config.method, "--speculative-config"))


def json_object(text: str) -> dict[str, Any]:
    """The JSON object of `--speculative-config`, unchecked. Raises ConfigError."""
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--speculative-config is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError("--speculative-config must be a JSON object")
    return raw
