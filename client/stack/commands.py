"""The settings of a stack on one machine, and the command line of each of its services."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from outrider.client.stack.process_identity import process_identity
from outrider.shared.checkpoint.mtp_layers import has_mtp_layers
from outrider.shared.draft_policy.draft_methods import AUTO, FROM_TARGET, WITHOUT_CHECKPOINT, without_lookup
from outrider.shared.draft_policy.named_drafts import NamedDraft
from outrider.shared.listening import grpc_port_of
from outrider.shared.speculative_config import parse_speculative_config

# The name in `StackState.pids` of the process that starts the others again.
SUPERVISOR = "supervisor"
# seconds; a gateway's sessions wait at least as long for a verifier that died; its --failover-s has the same default
_LEAST_FAILOVER_S = 30.0


@dataclass(frozen=True)
class StackSettings:
    """The options of `outrider up`. Empty redis_url: start a Redis. num_drafters 0: the verifier drafts in its own
    process and gets drafter_args. start_timeout_s: without any step reported by the service that is waited for.
    """

    model: str
    # Checkpoint folders of draft models and heads, comma-separated.
    draft_model: str
    # Empty: every method of the checkpoints, or without one of the target's own files, and those that need none.
    methods: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    # None: the one after `port`.
    grpc_port: int | None = None
    redis_url: str = ""
    num_drafters: int = 1
    dtype: str = "auto"
    # The format that the target must have, by vLLM's name; "": any that is read.
    quantization: str = ""
    speculative_config: str = ""
    # The gateway's options; "": what its environment says.
    generation_config: str = ""
    override_generation_config: str = ""
    verifier_args: tuple[str, ...] = ()
    drafter_args: tuple[str, ...] = ()
    gateway_args: tuple[str, ...] = ()
    start_timeout_s: float = 300.0

    @property
    def client_grpc_port(self) -> int:
        """Raises ConfigError."""
        return grpc_port_of(self.grpc_port, self.port)

    @property
    def drafts(self) -> list[NamedDraft]:
        return [NamedDraft.of(entry) for entry in self.draft_model.split(",") if entry]

    @property
    def draft_folders(self) -> list[str]:
        return [draft.path for draft in self.drafts]


@dataclass
class StackState:
    """The running stack, as stored in `stack.json`.

    pids: in starting order. identities: process_identity of each, as a pid may be another process's when it is read.
    commands: per process, with the port that it serves on. num_restarts: of those that died. verifier_start_s: how long
    the first start took. redis_config: that of the stack's own Redis, with its password (own_redis.py). in_foreground:
    the processes end with the one that started them.
    """

    url: str = ""
    grpc_address: str = ""
    redis_url: str = ""
    redis_config: str = ""
    verifiers: list[str] = field(default_factory=list)
    drafters: list[str] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)
    identities: dict[str, str] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)
    num_restarts: dict[str, int] = field(default_factory=dict)
    verifier_start_s: float = 0.0
    in_foreground: bool = False

    def record(self, name: str, pid: int) -> None:
        """Records a process that has just been started."""
        self.pids[name], self.identities[name] = pid, process_identity(pid)

    def runs(self, name: str) -> bool:
        """Returns whether the process is still the one that was started."""
        identity = self.identities.get(name, "")
        return bool(identity) and identity == process_identity(self.pids[name])


def methods_without_draft(settings: StackSettings) -> tuple[str, ...]:
    """Returns the draft methods of a stack without a draft.

    An MTP layer takes memory, so its method is included only if it may be used.
    """
    method = without_lookup(parse_speculative_config(settings.speculative_config).method)
    uses_own = method in (AUTO, *FROM_TARGET) and has_mtp_layers(Path(settings.model))
    return (*(FROM_TARGET if uses_own else ()), *WITHOUT_CHECKPOINT)


def verifier_command(settings: StackSettings) -> list[str]:
    command = [
        *(sys.executable, "-m", "outrider.verifier_service", "--model", settings.model, "--port", "0"),
        *("--dtype", settings.dtype, *settings.verifier_args),
    ]
    if settings.num_drafters:
        return command
    if settings.draft_model:
        command += ["--local-draft-model", settings.draft_model]
    methods = ",".join(settings.methods or (() if settings.draft_model else methods_without_draft(settings)))
    # The draft's own option: the target has one of the same name.
    drafting = ["--local-enforce-eager" if part == "--enforce-eager" else part for part in settings.drafter_args]
    return [*command, *(("--local-methods", methods) if methods else ()), *drafting]


def drafter_command(settings: StackSettings) -> list[str]:
    command = [
        *(sys.executable, "-m", "outrider.drafter_service", "--port", "0"),
        *("--target-model", settings.model, "--dtype", settings.dtype, *settings.drafter_args),
    ]
    if settings.methods:
        command += ["--methods", ",".join(settings.methods)]
    if settings.draft_model:
        command += ["--draft-model", settings.draft_model]
    return command


def gateway_command(settings: StackSettings, state: StackState) -> list[str]:
    """Returns the gateway's command, without the Redis URL.

    The URL may have a password and any user can read command lines, so the environment passes it.
    """
    command = [
        *(sys.executable, "-m", "outrider.gateway", "--model", settings.model),
        *("--host", settings.host, "--port", str(settings.port), "--grpc-port", str(settings.client_grpc_port)),
        *("--verifiers", ",".join(state.verifiers), "--drafters", ",".join(state.drafters)),
    ]
    if "OUTRIDER_FAILOVER_S" not in os.environ:  # an operator's own patience counts
        # A verifier that died loads again: on a machine that is busier, for longer than the first time.
        command += ["--failover-s", f"{_LEAST_FAILOVER_S + 2 * state.verifier_start_s:.0f}"]
    if settings.speculative_config:
        command += ["--speculative-config", settings.speculative_config]
    if settings.generation_config:
        command += ["--generation-config", settings.generation_config]
    if settings.override_generation_config:
        command += ["--override-generation-config", settings.override_generation_config]
    return [*command, *settings.gateway_args]
