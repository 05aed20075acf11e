"""TLS settings, and gRPC over real sockets with certificates of the test's own: who gets in, who does not."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from outrider.shared import rpc
from outrider.shared.errors import ConfigError
from outrider.shared.healthcheck import EXIT_NOT_WELL, EXIT_USAGE, EXIT_WELL
from outrider.shared.tls import TlsConfig, client_tls, server_tls
from tests.certificates import Authority, Issued

NAME = "verifier"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder, "fleet")


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Authority:
    return Authority(folder, "stranger")


@pytest.fixture(scope="module")
def verifier(authority: Authority) -> Issued:
    return authority.issue(NAME, dns_names=(NAME,))


@pytest.fixture(scope="module")
def gateway(authority: Authority) -> Issued:
    return authority.issue("gateway", dns_names=("gateway",))


@asynccontextmanager
async def serving(tls: TlsConfig | None) -> AsyncIterator[str]:
    """Address of a server that says SERVING."""
    server = await rpc.start_server("127.0.0.1", 0, lambda _: None, (), rpc.ServerOptions(tls=tls))
    await server.serving()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.drain(0)


async def is_answered(address: str, tls: TlsConfig | None, server_name: str = NAME) -> bool:
    async with rpc.open_channel(address, tls, server_name) as channel:
        return await rpc.is_serving(channel, 30.0)


# ---- settings ---------------------------------------------------------------------------------------------------


def test_no_file_is_no_tls() -> None:
    assert server_tls("", "", "") is None
    assert client_tls("", "", "", setting="fleet-tls") is None


@pytest.mark.parametrize(
    ("make", "files", "given", "missing"),
    [
        (server_tls, ("c", "", ""), "--tls-cert-file", "--tls-key-file"),
        (server_tls, ("", "k", ""), "--tls-key-file", "--tls-cert-file"),
        (server_tls, ("", "", "a"), "--tls-ca-file", "--tls-cert-file"),
        (server_tls, ("", "k", "a"), "--tls-key-file", "--tls-cert-file"),
        (client_tls, ("c", "k", ""), "--tls-cert-file", "--tls-ca-file"),
        (client_tls, ("c", "", "a"), "--tls-cert-file", "--tls-key-file"),
        (client_tls, ("", "k", "a"), "--tls-key-file", "--tls-cert-file"),
    ],
)
def test_half_given_settings_name_what_is_missing(
    make: Callable[..., TlsConfig | None], files: tuple[str, str, str], given: str, missing: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        make(*files, setting="tls")
    assert raised.value.message.startswith(f"{given} is given, so {missing}")


def test_broken_files_name_the_setting(folder: Path, authority: Authority, verifier: Issued, gateway: Issued) -> None:
    garbage = folder / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    encrypted = authority.issue("secret", dns_names=("secret",), password=b"pass")
    cases = [
        (("/no/such.pem", verifier.key_file, ""), "--tls-cert-file: /no/such.pem does not exist"),
        ((verifier.cert_file, "/no/such.pem", ""), "--tls-key-file: /no/such.pem does not exist"),
        ((verifier.cert_file, verifier.key_file, "/no/such.pem"), "--tls-ca-file: /no/such.pem does not exist"),
        ((verifier.cert_file, gateway.key_file, ""), "do not load as a pair"),
        ((str(garbage), verifier.key_file, ""), "do not load as a pair"),
        ((verifier.cert_file, verifier.key_file, str(garbage)), "has no PEM certificate"),
        ((encrypted.cert_file, encrypted.key_file, ""), "is encrypted"),
    ]
    for files, message in cases:
        with pytest.raises(ConfigError, match=message):
            server_tls(*files)


@pytest.mark.parametrize("service", ["outrider.gateway", "outrider.verifier_service", "outrider.drafter_service"])
def test_a_service_ends_with_2_and_one_line(service: str, verifier: Issued) -> None:
    command = [sys.executable, "-m", service, "--tls-cert-file", verifier.cert_file]
    command += ["--model", "models/demo-target"] if service != "outrider.drafter_service" else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.endswith("--tls-cert-file is given, so --tls-key-file must be too")


# ---- gRPC -------------------------------------------------------------------------------------------------------


async def test_the_server_is_verified(authority: Authority, stranger: Authority, verifier: Issued) -> None:
    async with serving(server_tls(verifier.cert_file, verifier.key_file, "")) as address:
        assert await is_answered(address, TlsConfig(ca_file=authority.ca_file))
        assert not await is_answered(address, TlsConfig(ca_file=stranger.ca_file))
        assert not await is_answered(address, TlsConfig(ca_file=authority.ca_file), server_name="drafter")
        assert not await is_answered(address, None)
    async with serving(None) as address:
        assert await is_answered(address, None)
        assert not await is_answered(address, TlsConfig(ca_file=authority.ca_file))


async def test_an_address_in_the_certificate_needs_no_name(authority: Authority) -> None:
    issued = authority.issue("by-address", addresses=("127.0.0.1",))
    async with serving(server_tls(issued.cert_file, issued.key_file, "")) as address:
        assert await is_answered(address, TlsConfig(ca_file=authority.ca_file), server_name="")
        assert await is_answered(address, TlsConfig(ca_file=authority.ca_file), server_name="127.0.0.1")
        assert not await is_answered(address, TlsConfig(ca_file=authority.ca_file), server_name="127.0.0.2")


async def test_a_certificate_that_has_run_out(authority: Authority) -> None:
    issued = authority.issue("old", dns_names=(NAME,), days=0)
    async with serving(server_tls(issued.cert_file, issued.key_file, "")) as address:
        assert not await is_answered(address, TlsConfig(ca_file=authority.ca_file))


async def test_with_a_ca_file_clients_must_present_a_certificate(
    authority: Authority, stranger: Authority, verifier: Issued, gateway: Issued
) -> None:
    outsider = stranger.issue("gateway", dns_names=("gateway",))
    async with serving(server_tls(verifier.cert_file, verifier.key_file, authority.ca_file)) as address:
        assert await is_answered(address, TlsConfig(gateway.cert_file, gateway.key_file, authority.ca_file))
        assert not await is_answered(address, TlsConfig(ca_file=authority.ca_file))
        assert not await is_answered(address, TlsConfig(outsider.cert_file, outsider.key_file, authority.ca_file))


async def test_old_protocol_versions_are_refused(authority: Authority, verifier: Issued) -> None:
    async with serving(server_tls(verifier.cert_file, verifier.key_file, "")) as address:
        host, _, port = address.rpartition(":")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for end in ("minimum_version", "maximum_version"):
            with pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
                setattr(context, end, ssl.TLSVersion.TLSv1_1)
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.load_verify_locations(authority.ca_file)
        with (
            socket.create_connection((host, int(port)), 30) as plain,
            pytest.raises(ssl.SSLError, match=r"EOF occurred|alert protocol version"),
        ):
            await asyncio.to_thread(context.wrap_socket, plain, server_hostname=NAME)


# ---- the health probe -------------------------------------------------------------------------------------------


def probe(address: str, **environ: str) -> tuple[int, str]:
    """(exit code, output) of the command in a service's environment."""
    names = {f"OUTRIDER_TLS_{name.upper()}_FILE": value for name, value in environ.items()}
    done = subprocess.run(
        [sys.executable, "-m", "outrider.shared.healthcheck", address],
        env={**os.environ, **names},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("mutual", [False, True])
async def test_the_probe_trusts_the_services_own_certificate(
    authority: Authority, verifier: Issued, gateway: Issued, mutual: bool
) -> None:
    ca_file = authority.ca_file if mutual else ""
    async with serving(server_tls(verifier.cert_file, verifier.key_file, ca_file)) as address:
        own = {"cert": verifier.cert_file, "key": verifier.key_file, "ca": ca_file}
        assert await asyncio.to_thread(probe, address, **own) == (EXIT_WELL, "")
        other = {"cert": gateway.cert_file, "key": gateway.key_file, "ca": ca_file}
        code, output = await asyncio.to_thread(probe, address, **other)
        assert code == EXIT_NOT_WELL
        assert output.startswith(f"{address}: no TLS")
        assert (await asyncio.to_thread(probe, address))[0] == EXIT_NOT_WELL


async def test_the_probe_may_present_another_certificate(
    authority: Authority, stranger: Authority, verifier: Issued, gateway: Issued
) -> None:
    """Doors with a public certificate and an authority of their own for clients."""
    public = stranger.issue("public", dns_names=("api.example",))
    async with serving(server_tls(public.cert_file, public.key_file, authority.ca_file)) as address:
        own = {"cert": public.cert_file, "key": public.key_file, "ca": authority.ca_file}
        assert (await asyncio.to_thread(probe, address, **own))[0] == EXIT_NOT_WELL
        also = {"probe_cert": gateway.cert_file, "probe_key": gateway.key_file}
        assert await asyncio.to_thread(probe, address, **own, **also) == (EXIT_WELL, "")
        code, output = await asyncio.to_thread(probe, address, **own, probe_cert=gateway.cert_file)
        assert code == EXIT_USAGE
        assert "--tls-probe-cert-file is given, so --tls-probe-key-file must be too" in output
