"""`outrider doctor`: will it run here, and what to do where it will not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from client.cli_common import DEFAULT_RUN_DIR, Json, RunDir, clear_errors, console, print_json
from client.cli_stack import DraftModel, Dtype, GrpcPort, Host, Model, Port, RedisUrl
from client.doctor.check import Check
from client.stack_commands import StackSettings
from shared.errors import ConfigError, InvalidRequest

Device = Annotated[str, typer.Option(help="cpu or cuda.")]
KvCacheMb = Annotated[int, typer.Option(min=1, help="The verifier's, in MiB.")]
Certificate = Annotated[bool, typer.Option(help="Load the target and prove that exact mode holds.")]
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    model: Model = "models/demo-target",
    draft_model: DraftModel = "models/demo-draft",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    grpc_port: GrpcPort = 8001,
    redis_url: RedisUrl = "",
    dtype: Dtype = "auto",
    device: Device = "cpu",
    kv_cache_mb: KvCacheMb = 512,
    certificate: Certificate = True,
    run_dir: RunDir = DEFAULT_RUN_DIR,
    as_json: Json = False,
) -> None:
    """Check this machine, Redis and the checkpoints before `outrider up`; takes its options. It changes nothing.

    Exit code 1 when a check fails.

    Examples:

      outrider doctor

      outrider doctor --model ~/checkpoints/llama --redis-url redis://db:6379/0

      outrider doctor --no-certificate --json
    """
    with clear_errors():
        if device not in ("cpu", "cuda"):
            raise InvalidRequest(f"--device must be cpu or cuda, not {device}")
        look = _all_checks()
        settings = StackSettings(model, draft_model, (), host, port, grpc_port, redis_url, dtype=dtype)
        found = []
        with console.status("looking"):
            for check in look(settings, run_dir, device, kv_cache_mb, with_certificate=certificate):
                found.append(check)
                if not as_json:
                    _show(check)
        num_failed = sum(check.level == "fail" for check in found)
        if as_json:
            print_json({"ok": not num_failed, "checks": [asdict(check) for check in found]})
        else:
            num_warnings = sum(check.level == "warn" for check in found)
            console.print(f"\n{len(found)} checks: {num_failed} failed, {num_warnings} warnings")
    raise typer.Exit(1 if num_failed else 0)


def _all_checks() -> Callable[..., Iterator[Check]]:
    """Raises ConfigError where only the client's wheel is installed: it comes without Redis' package."""
    try:
        from client.doctor.all_checks import all_checks
    except ImportError as error:
        raise ConfigError(
            f"the doctor is for machines that serve, and {error.name} is not installed: pip install 'outrider[server]'"
        ) from None
    return all_checks


def _show(check: Check) -> None:
    level = (f"{check.level:4}", _STYLES[check.level])
    console.print(Text.assemble(level, f"  {check.name}: {check.found}"), soft_wrap=True)
    if check.advice:
        console.print(Text(f"      -> {check.advice}"), soft_wrap=True)
