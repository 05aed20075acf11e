"""Every check of the doctor, the quick ones first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from client.doctor.check import Check
from client.doctor.checkpoints import check_checkpoints
from client.doctor.machine import check_disk, check_memory, check_port
from client.doctor.packages import check_packages
from client.doctor.programs import check_certificate, check_engine
from client.doctor.redis_server import check_redis
from client.stack import read_state
from client.stack_commands import StackSettings


def all_checks(
    settings: StackSettings, run_dir: Path, device: str, kv_cache_mb: int, *, with_certificate: bool
) -> Iterator[Check]:
    drafts = [folder for folder in settings.draft_model.split(",") if folder]
    state = read_state(run_dir)
    yield from check_packages()
    yield from check_redis(settings.redis_url or (state.redis_url if state else ""))
    ours = {address.rpartition(":")[2] for address in (state.url, state.grpc_address)} if state else set()
    for port, option in ((settings.port, "--port"), (settings.grpc_port, "--grpc-port")):
        yield check_port(settings.host, port, option, str(port) in ours)
    yield check_disk(run_dir)
    yield from check_memory([settings.model, *drafts], kv_cache_mb, state is not None)
    yield from check_checkpoints(settings.model, drafts)
    yield from check_engine(drafts, device)
    if with_certificate:
        yield check_certificate(settings.model, device, settings.dtype)
