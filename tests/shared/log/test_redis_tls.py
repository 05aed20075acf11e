"""The commit log over rediss://: the URL alone says who is trusted and which certificate is presented."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from outrider.shared.errors import Unavailable
from outrider.shared.log.commit_log import CommitLog
from outrider.shared.log.patient_redis import RedisState
from tests.certificates import Authority
from tests.ports import server_port

START_TIMEOUT_S = 60.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "redis")


@pytest.fixture
async def address(authority: Authority, tmp_path: Path) -> AsyncIterator[str]:
    """A Redis that speaks TLS only and asks its clients for a certificate."""
    server = authority.issue("redis", addresses=("127.0.0.1",))
    port = server_port()
    binary = shutil.which("redis-server")
    assert binary is not None
    process = await asyncio.create_subprocess_exec(
        *(binary, "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path), "--save", ""),
        *("--tls-cert-file", server.cert_file, "--tls-key-file", server.key_file),
        *("--tls-ca-cert-file", authority.ca_file, "--tls-auth-clients", "yes"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(START_TIMEOUT_S):
        while b"Ready to accept connections" not in (line := await process.stdout.readline()):
            assert line, "redis-server ended: was it built with TLS?"
    yield f"rediss://127.0.0.1:{port}/0"
    process.terminate()
    await process.communicate()


async def test_the_commit_log_over_mutual_tls(address: str, authority: Authority) -> None:
    own = authority.issue("gateway")
    files = {"ssl_ca_certs": authority.ca_file, "ssl_certfile": own.cert_file, "ssl_keyfile": own.key_file}
    log = CommitLog.connect(f"{address}?{urlencode(files)}", ttl_s=60)
    await log.start()
    assert await log.check() == RedisState(answers=True)
    await log.close()


@pytest.mark.parametrize("missing", ["authority", "certificate", "tls"])
async def test_who_is_not_let_in(address: str, authority: Authority, tmp_path: Path, missing: str) -> None:
    own = authority.issue("gateway")
    files = {"ssl_ca_certs": authority.ca_file, "ssl_certfile": own.cert_file, "ssl_keyfile": own.key_file}
    if missing == "authority":
        files["ssl_ca_certs"] = Authority(tmp_path, "stranger").ca_file
    elif missing == "certificate":
        del files["ssl_certfile"], files["ssl_keyfile"]
    else:
        address, files = address.replace("rediss://", "redis://"), {}
    log = CommitLog.connect(f"{address}?{urlencode(files)}", ttl_s=60, patience_s=3.0)
    with pytest.raises(Unavailable):
        await log.start()
    await log.close()
