"""Health check for a container's HEALTHCHECK: exit code 0 if all targets are healthy, else 1 and the reasons.

    python -m outrider.shared.healthcheck 127.0.0.1:7001
    python -m outrider.shared.healthcheck 127.0.0.1:8001 127.0.0.1:8000/ready

host:port is checked by the gRPC health protocol; host:port/path, http://... and https://... must answer with a status
under 400. Run it in the service's own environment: if OUTRIDER_TLS_CERT_FILE is set, host:port and host:port/path are
checked over TLS, trusting only the service's own certificate. To a service that requires client certificates the probe
presents OUTRIDER_TLS_PROBE_CERT_FILE, or else that same certificate. Each target is checked once; a draining service is
unhealthy.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.shared import rpc
from outrider.shared.config import ENV_PREFIX
from outrider.shared.errors import ConfigError
from outrider.shared.tls import TlsConfig, client_context, client_tls

CHECK_TIMEOUT_S = 4.0
EXIT_WELL, EXIT_NOT_WELL, EXIT_USAGE = 0, 1, 2


def probe_tls(environ: Mapping[str, str]) -> TlsConfig | None:
    """The service's TLS settings from the client's side: its certificate is the one to trust. Raises ConfigError."""
    served_file = environ.get(f"{ENV_PREFIX}TLS_CERT_FILE", "")
    if not served_file:
        return None
    prefix = "tls-probe" if environ.get(f"{ENV_PREFIX}TLS_PROBE_CERT_FILE") else "tls"
    variable = ENV_PREFIX + prefix.replace("-", "_").upper()
    cert_file, key_file = (environ.get(f"{variable}_{name}_FILE", "") for name in ("CERT", "KEY"))
    return client_tls(cert_file, key_file, served_file, setting=prefix)


async def reason_not_well(target: str, tls: TlsConfig | None = None, timeout_s: float = CHECK_TIMEOUT_S) -> str | None:
    """Returns why `target` is not healthy; None: it is healthy."""
    if "/" in target:
        url = target if "://" in target else f"{'http' if tls is None else 'https'}://{target}"
        return await asyncio.to_thread(_reason_http, url, tls, timeout_s)
    try:
        name = "" if tls is None else await asyncio.to_thread(_certificate_name, target, tls, timeout_s)
    except OSError as error:
        return f"no TLS: {error}"
    channel = rpc.open_channel(target, tls, name)
    try:
        return None if await rpc.is_serving(channel, timeout_s) else "does not say SERVING"
    finally:
        await channel.close()


def _certificate_name(target: str, tls: TlsConfig, timeout_s: float) -> str:
    """A name in the certificate at `target`: the probe connects to an address, but certificates are for names."""
    host, _, port = target.rpartition(":")
    context = _nameless_context(tls)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host.strip("[]"), int(port)), timeout_s) as plain,
        context.wrap_socket(plain) as secured,
    ):
        certificate: dict[str, Any] = dict(secured.getpeercert() or {})
    names = [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    if not names:
        raise OSError("the certificate has no subject alternative name")
    return str(names[0]).replace("*", "any", 1)


def _nameless_context(tls: TlsConfig) -> ssl.SSLContext:
    # Safe without a host name: exactly one certificate is trusted.
    context = client_context(tls)
    context.check_hostname = False
    return context


def _reason_http(url: str, tls: TlsConfig | None, timeout_s: float) -> str | None:
    # Proxies from the environment are for external hosts, not for this check.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=_nameless_context(tls)))
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        with error:
            return f"{error.code} {error.read(500).decode(errors='replace')}".rstrip()
    except OSError as error:
        return str(error)


async def check(targets: Sequence[str], tls: TlsConfig | None = None) -> int:
    """Checks all targets concurrently; prints one line for each unhealthy one."""
    reasons = await asyncio.gather(*(reason_not_well(target, tls) for target in targets))
    for target, reason in zip(targets, reasons, strict=True):
        if reason is not None:
            print(f"{target}: {reason}")
    return EXIT_WELL if all(reason is None for reason in reasons) else EXIT_NOT_WELL


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    if not argv or any(argument.startswith("-") for argument in argv):
        print("usage: python -m outrider.shared.healthcheck HOST:PORT|HOST:PORT/PATH|URL ...", file=sys.stderr)
        return EXIT_USAGE
    try:
        tls = probe_tls(environ)
    except ConfigError as error:
        print(f"healthcheck: {error.message}", file=sys.stderr)
        return EXIT_USAGE
    return asyncio.run(check(argv, tls))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
