"""The checks before `outrider up`, `serve` and `demo` start a process: all that need no weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outrider.client.doctor.check import Check
from outrider.client.doctor.checkpoints import check_checkpoints, check_context, check_ranks
from outrider.client.doctor.machine import check_disk, check_least_memory, check_port
from outrider.client.doctor.programs import ProgramFailed, check_gateway, probe
from outrider.client.doctor.redis_server import check_redis
from outrider.client.doctor.speculation import check_speculation
from outrider.client.stack.commands import StackSettings
from outrider.shared.checkpoint.sampling_defaults import load_sampling_defaults
from outrider.shared.errors import ConfigError
from outrider.shared.speculative_config import parse_speculative_config

# MiB; the verifier's default --kv-cache-mb
_KV_CACHE_MB = 512


def check_before_start(settings: StackSettings, run_dir: Path) -> None:
    """Checks settings and machine before a start. Raises ConfigError with a line for each check that fails."""
    parse_speculative_config(settings.speculative_config)
    if settings.generation_config:
        load_sampling_defaults(settings.model, settings.generation_config, settings.override_generation_config)
    _refuse(_quick_checks(settings, run_dir))
    _refuse(_program_checks(settings))


def _refuse(checks: Iterator[Check]) -> None:
    failed = [f"{check.name}: {check.found}; {check.advice}" for check in checks if check.level == "fail"]
    if failed:
        raise ConfigError("\n".join(dict.fromkeys(failed)))


def _quick_checks(settings: StackSettings, run_dir: Path) -> Iterator[Check]:
    if settings.redis_url:
        yield from check_redis(settings.redis_url)
    grpc_port = settings.client_grpc_port
    if settings.port and settings.port == grpc_port:
        yield Check("ports", "fail", f"--grpc-port {grpc_port} is --port already", "give another --grpc-port")
    yield check_port(settings.host, settings.port, "--port", False)
    yield check_port(settings.host, grpc_port, "--grpc-port", False)
    yield check_disk(run_dir)
    yield from check_checkpoints(settings.model, settings.draft_folders)
    yield from check_context(settings.model, _number(settings, "--max-model-len", 0))
    yield from check_ranks(settings.model, _number(settings, "--tensor-parallel-size", 1))
    for folder, count in Counter(settings.draft_folders).items():
        if count > 1:  # the kinds of two drafts are compared later, by a process that has torch
            yield Check(f"draft {folder}", "fail", "it is given twice", "name each --draft-model once")
    folders = [settings.model, *settings.draft_folders]
    yield from check_least_memory(folders, _number(settings, "--kv-cache-mb", _KV_CACHE_MB), settings.dtype)


def _number(settings: StackSettings, option: str, default: int) -> int:
    """The value that the verifier is given."""
    given = settings.verifier_args
    return int(given[given.index(option) + 1]) if option in given else default


def _program_checks(settings: StackSettings) -> Iterator[Check]:
    """Runs the checks that take seconds, concurrently."""
    with ThreadPoolExecutor(1) as pool:
        gateway = pool.submit(check_gateway, settings)
        yield from _draft_checks(settings)
        yield gateway.result()


def _draft_checks(settings: StackSettings) -> Iterator[Check]:
    """Checks the drafts. A child process imports torch, which takes seconds, if there are checkpoints to recognise."""
    try:
        recognised = probe(settings.draft_folders)["checkpoints"] if settings.draft_folders else []
    except ProgramFailed as error:
        yield Check("engine", "fail", str(error), "pip install 'outrider[server]'")
        return
    yield from check_speculation(settings, recognised)
