"""Checks Redis: is it reachable, does it persist its data, does its clock agree with ours."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from outrider.client.doctor.check import Check
from outrider.client.stack.processes import free_port

_TESTED_MAJOR = 7
_TIMEOUT_S = 3.0
_CLOCK_PERIOD_S = 0.5
# seconds; offset between Redis' clock (session expiry) and ours (request deadlines), neither finer than this
_MAX_OFFSET_S = 1.0
_MAX_DRIFT_S = 0.05


def check_redis(url: str) -> Iterator[Check]:
    """Checks the Redis at url; if that is empty, checks by starting one briefly that a Redis can be started here."""
    if url:
        yield from _check_at(url, is_lasting=True)
        return
    server = shutil.which("redis-server")
    if server is None:
        advice = "install it (apt-get install redis-server, brew install redis), or give --redis-url"
        yield Check("redis", "fail", "redis-server is not on the PATH", advice)
        return
    try:
        with _redis_of_our_own(server) as own_url:
            yield from _check_at(own_url, is_lasting=False)
    except OSError as error:
        yield Check("redis", "fail", str(error), "repair redis-server, or give a running one with --redis-url")


@contextmanager
def _redis_of_our_own(server: str) -> Iterator[str]:
    """Starts a Redis and yields its URL. Raises OSError when it does not start."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        log_path = Path(folder) / "log"
        with log_path.open("wb") as log_file, subprocess.Popen(command, stdout=log_file) as process:
            try:
                _wait_until_answers(port, process, log_path)
                yield f"redis://127.0.0.1:{port}/0"
            finally:
                process.terminate()


def _wait_until_answers(port: int, process: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline = time.monotonic() + 10
    with redis.Redis(port=port, socket_timeout=_TIMEOUT_S) as client:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                client.ping()
                return
            except redis.RedisError:
                time.sleep(0.05)
    raise OSError(f"redis-server does not start: {log_path.read_text(errors='replace')[-300:]}")


def _check_at(url: str, *, is_lasting: bool) -> Iterator[Check]:
    try:
        client = redis.Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        with client:
            info: dict[str, Any] = client.info()
            yield _version(info, is_lasting)
            if is_lasting:
                yield _persistence(info)
                yield _eviction(info)
            yield _clock(client)
    except (redis.RedisError, ValueError, OSError) as error:
        yield Check("redis", "fail", f"{url.rpartition('@')[2]}: {error}", "start it, or correct --redis-url")


def _version(info: dict[str, Any], is_lasting: bool) -> Check:
    version = str(info["redis_version"])
    found = f"{version}, answers" if is_lasting else f"{version}, `outrider up` starts its own"
    if info.get("cluster_enabled"):
        return Check("redis", "fail", f"{version} as a cluster", "use a single Redis: clusters are not supported")
    if int(version.split(".")[0]) < _TESTED_MAJOR:
        return Check("redis", "warn", found, f"tested with Redis {_TESTED_MAJOR} and newer only")
    return Check("redis", "ok", found)


def _persistence(info: dict[str, Any]) -> Check:
    if info.get("aof_enabled"):
        return Check("redis keeps", "ok", "append-only file is on")
    advice = (
        "redis-cli config set appendonly yes; without it a restart loses the log, which only live gateways can restore"
    )
    return Check("redis keeps", "warn", "append-only file is off", advice)


def _eviction(info: dict[str, Any]) -> Check:
    policy, limit = info.get("maxmemory_policy", "noeviction"), int(info.get("maxmemory", 0))
    if not limit or policy == "noeviction":
        return Check("redis memory", "ok", f"{limit // 2**20 or 'no'} MiB limit, {policy}")
    advice = "redis-cli config set maxmemory-policy noeviction; a full Redis must refuse writes, not drop logs"
    return Check("redis memory", "fail", f"evicts ({policy}) beyond {limit // 2**20} MiB", advice)


@dataclass(frozen=True)
class _ClockSample:
    """The clocks at one moment, in seconds. uncertain_s: half the round-trip time."""

    redis_s: float
    wall_s: float
    monotonic_s: float
    uncertain_s: float


def _clock_sample(client: redis.Redis) -> _ClockSample:
    wall_s, asked_s = time.time(), time.monotonic()
    seconds, microseconds = client.time()
    half_s = (time.monotonic() - asked_s) / 2
    return _ClockSample(seconds + microseconds / 1e6, wall_s + half_s, asked_s + half_s, half_s)


def _clock(client: redis.Redis) -> Check:
    """Checks Redis' clock: its offset from ours, and its drift from our monotonic clock within _CLOCK_PERIOD_S."""
    earlier = _clock_sample(client)
    time.sleep(_CLOCK_PERIOD_S)
    later = _clock_sample(client)
    offset_s = later.redis_s - later.wall_s
    drift_s = (later.redis_s - earlier.redis_s) - (later.monotonic_s - earlier.monotonic_s)
    uncertain_s = earlier.uncertain_s + later.uncertain_s
    found = (
        f"{offset_s * 1e3:+.0f} ms to Redis, {drift_s * 1e3:+.1f} ms in {_CLOCK_PERIOD_S} s (± {uncertain_s * 1e3:.1f})"
    )
    if abs(offset_s) > _MAX_OFFSET_S + uncertain_s:
        return Check("clock", "warn", found, "synchronise both clocks (chrony, ntpd)")
    if abs(drift_s) > _MAX_DRIFT_S + uncertain_s:
        return Check("clock", "warn", found, "a clock jumps or drifts: time limits will be wrong")
    return Check("clock", "ok", found)
