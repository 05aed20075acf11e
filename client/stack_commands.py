"""What a stack on one machine is made of, and the command line of each of its services."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

# What can be drafted with where there is no checkpoint.
_WITHOUT_CHECKPOINT = "ngram,suffix"


@dataclass(frozen=True)
class StackSettings:
    """What `outrider up` was asked for. Empty redis_url: a Redis of its own. num_drafters 0: the verifier drafts by
    itself, and takes drafter_args.
    """

    model: str
    # Checkpoints of draft models and heads, comma-separated.
    draft_model: str
    # Empty: all that the checkpoints give, and those that need none.
    methods: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 8001
    redis_url: str = ""
    num_drafters: int = 1
    dtype: str = "auto"
    speculative_config: str = ""
    verifier_args: tuple[str, ...] = ()
    drafter_args: tuple[str, ...] = ()
    gateway_args: tuple[str, ...] = ()
    start_timeout_s: float = 300.0


@dataclass
class StackState:
    """What runs; kept in `stack.json`. `pids` in the order of starting."""

    url: str = ""
    grpc_address: str = ""
    redis_url: str = ""
    verifiers: list[str] = field(default_factory=list)
    drafters: list[str] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)


def verifier_command(settings: StackSettings) -> list[str]:
    command = [
        *(sys.executable, "-m", "verifier_service", "--model", settings.model, "--port", "0"),
        *("--dtype", settings.dtype, *settings.verifier_args),
    ]
    if settings.num_drafters:
        return command
    if settings.draft_model:
        command += ["--local-draft-model", settings.draft_model]
    methods = ",".join(settings.methods) or ("" if settings.draft_model else _WITHOUT_CHECKPOINT)
    # The draft's own setting: the target has one of this name too.
    drafting = ["--local-enforce-eager" if part == "--enforce-eager" else part for part in settings.drafter_args]
    return [*command, *(("--local-methods", methods) if methods else ()), *drafting]


def drafter_command(settings: StackSettings) -> list[str]:
    command = [
        *(sys.executable, "-m", "drafter_service", "--port", "0"),
        *("--target-model", settings.model, "--dtype", settings.dtype, *settings.drafter_args),
    ]
    if settings.methods:
        command += ["--methods", ",".join(settings.methods)]
    if settings.draft_model:
        command += ["--draft-model", settings.draft_model]
    return command


def gateway_command(settings: StackSettings, state: StackState) -> list[str]:
    command = [
        *(sys.executable, "-m", "gateway", "--model", settings.model),
        *("--host", settings.host, "--port", str(settings.port), "--grpc-port", str(settings.grpc_port)),
        *("--verifiers", ",".join(state.verifiers), "--drafters", ",".join(state.drafters)),
        *("--redis-url", state.redis_url),
    ]
    if settings.speculative_config:
        command += ["--speculative-config", settings.speculative_config]
    return [*command, *settings.gateway_args]
