"""`outrider doctor`: checks whether the stack will run here, and advises where it will not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from outrider.client.cli.common import DEFAULT_RUN_DIR, Json, RunDir, clear_errors, console, print_json
from outrider.client.cli.stack import DraftModel, Dtype, GrpcPort, Host, Model, Port, RedisUrl, SpecConfig
from outrider.client.doctor.check import Check
from outrider.client.stack.commands import StackSettings
from outrider.shared.command_line import from_arguments
from outrider.shared.errors import ConfigError, InvalidRequest

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
KvCacheMb = Annotated[int, typer.Option(min=1, help="The verifier's KV cache, in MiB.")]
Certificate = Annotated[bool, typer.Option(help="Load the target and prove that exact mode holds.")]
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    model: Model = "models/demo-target",
    draft_model: DraftModel = "models/demo-draft",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    grpc_port: GrpcPort = None,
    redis_url: RedisUrl = "",
    dtype: Dtype = "auto",
    speculative_config: SpecConfig = "",
    device: Device = "auto",
    kv_cache_mb: KvCacheMb = 512,
    certificate: Certificate = True,
    run_dir: RunDir = DEFAULT_RUN_DIR,
    as_json: Json = False,
) -> None:
    """Check this machine, Redis and the checkpoints before `outrider up`; same options. Changes nothing.

    Exit code 1 when a check fails.

    Examples:

      outrider doctor

      outrider doctor --model ~/checkpoints/llama --redis-url redis://db:6379/0

      outrider doctor --no-certificate --json
    """
    with clear_errors():
        if device not in ("auto", "cpu", "cuda"):
            raise InvalidRequest(f"--device must be auto, cpu or cuda, not {device}")
        look = _all_checks()
        settings = from_arguments(StackSettings, locals())
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
    """Imports the checks. Raises ConfigError if only the client's wheel is installed: it has no Redis package."""
    try:
        from outrider.client.doctor.all_checks import all_checks
    except ImportError as error:
        raise ConfigError(
            f"the doctor checks a serving machine, but {error.name} is not installed: pip install 'outrider[server]'"
        ) from None
    return all_checks


def _show(check: Check) -> None:
    level = (f"{check.level:4}", _STYLES[check.level])
    console.print(Text.assemble(level, f"  {check.name}: {check.found}"), soft_wrap=True)
    if check.advice:
        console.print(Text(f"      -> {check.advice}"), soft_wrap=True)
