"""A real Prometheus for as long as something is measured; its binary has to be on PATH."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from outrider.shared.errors import ConfigError


@contextmanager
def prometheus_server(folder: Path, port: int, targets: Mapping[str, str]) -> Iterator[str]:
    """Yields its address. targets: host:port by job, scraped every 2 s. Raises ConfigError where there is no binary."""
    program = shutil.which("prometheus")
    if program is None:
        raise ConfigError("no `prometheus` on PATH: install it (Debian: apt-get install prometheus)")
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "1s"},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()
        ],
    }
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{port}"
    command = [program, f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"]
    process = subprocess.Popen(
        [*command, f"--web.listen-address={address}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                httpx.get(f"http://{address}/-/ready").raise_for_status()
                break
            except httpx.HTTPError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()
