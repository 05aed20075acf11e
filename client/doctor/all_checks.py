"""All checks of the doctor, the quick ones first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from outrider.client.doctor.check import Check
from outrider.client.doctor.checkpoints import check_checkpoints
from outrider.client.doctor.machine import check_disk, check_memory, check_port
from outrider.client.doctor.packages import check_packages
from outrider.client.doctor.programs import ProgramFailed, check_certificate, check_engine, check_gateway, probe
from outrider.client.doctor.redis_server import check_redis
from outrider.client.doctor.speculation import check_speculation
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.own_redis import redis_url_of
from outrider.client.stack.processes import read_state


def all_checks(
    settings: StackSettings, run_dir: Path, device: str, kv_cache_mb: int, *, with_certificate: bool
) -> Iterator[Check]:
    drafts = settings.draft_folders
    state = read_state(run_dir)
    yield from check_packages()
    yield from check_redis(settings.redis_url or (redis_url_of(state) if state else ""))
    ours = {address.rpartition(":")[2] for address in (state.url, state.grpc_address)} if state else set()
    for port, option in ((settings.port, "--port"), (settings.client_grpc_port, "--grpc-port")):
        yield check_port(settings.host, port, option, str(port) in ours)
    yield check_disk(run_dir)
    yield from check_memory([settings.model, *drafts], kv_cache_mb, state is not None)
    yield from check_checkpoints(settings.model, drafts)
    if (Path(settings.model) / "tokenizer.json").is_file():  # else `up` makes one before the gateway reads it
        yield check_gateway(settings)
    try:
        probed = probe(drafts)
    except ProgramFailed as error:
        yield Check("engine", "fail", str(error), "pip install 'outrider[server]'")
    else:
        yield from check_engine(probed, device)
        yield from check_speculation(settings, probed["checkpoints"])
    if with_certificate:
        yield check_certificate(settings.model, device, settings.dtype)
