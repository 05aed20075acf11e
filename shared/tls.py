"""TLS and mutual TLS for all servers and channels: three files, checked before anything listens.

On a server: certificate and key; with a CA file, clients must present a certificate signed by it. On a client: the CA
file verifies the server; certificate and key are presented if given. PEM files, TLS 1.2 or newer. Files are read once:
a renewed certificate needs a restart.

Redis is configured by its URL alone (rediss://host:6379/0?ssl_ca_certs=/path/ca.pem).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc

from outrider.shared.errors import ConfigError


@dataclass(frozen=True)
class TlsConfig:
    """Paths of PEM files; "" is none. Build it with `server_tls` or `client_tls`, which check the files."""

    cert_file: str = ""
    key_file: str = ""
    ca_file: str = ""


def server_tls(cert_file: str, key_file: str, ca_file: str, *, setting: str = "tls") -> TlsConfig | None:
    """Returns a server's TLS config; None without files.

    Raises ConfigError that names the missing setting or the broken file.
    """
    if not (cert_file or key_file or ca_file):
        return None
    _require_pair(cert_file, key_file, setting)
    if not cert_file:
        raise ConfigError(f"--{setting}-ca-file is given, so --{setting}-cert-file and its key must be too")
    tls = TlsConfig(cert_file, key_file, ca_file)
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tls, setting)
    return tls


def client_tls(cert_file: str, key_file: str, ca_file: str, *, setting: str) -> TlsConfig | None:
    """Returns a client's TLS config; None without files: the channel is plaintext. Raises as `server_tls` does."""
    if not (cert_file or key_file or ca_file):
        return None
    _require_pair(cert_file, key_file, setting)
    if not ca_file:
        raise ConfigError(f"--{setting}-cert-file is given, so --{setting}-ca-file must be too")
    tls = TlsConfig(cert_file, key_file, ca_file)
    client_context(tls, setting=setting)
    return tls


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Returns the credentials of a gRPC server's port."""
    pair = (_read(tls.key_file), _read(tls.cert_file))
    authority = _read(tls.ca_file) if tls.ca_file else None
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def channel_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    """Returns the credentials of a gRPC channel; the server is verified against the CA file."""
    key, cert = (_read(tls.key_file), _read(tls.cert_file)) if tls.cert_file else (None, None)
    return grpc.ssl_channel_credentials(_read(tls.ca_file), key, cert)


def client_context(tls: TlsConfig, *, setting: str = "tls") -> ssl.SSLContext:
    """Returns the context of a non-gRPC client. It trusts every certificate in the CA file, also a server's own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    _load(context, tls, setting)
    return context


def _require_pair(cert_file: str, key_file: str, setting: str) -> None:
    if cert_file and not key_file:
        raise ConfigError(f"--{setting}-cert-file is given, so --{setting}-key-file must be too")
    if key_file and not cert_file:
        raise ConfigError(f"--{setting}-key-file is given, so --{setting}-cert-file must be too")


def _load(context: ssl.SSLContext, tls: TlsConfig, setting: str) -> None:
    """Loads the files once: gRPC accepts broken files silently and fails later."""
    for path, name in ((tls.cert_file, "cert"), (tls.key_file, "key"), (tls.ca_file, "ca")):
        if path and not Path(path).is_file():
            raise ConfigError(f"--{setting}-{name}-file: {path} does not exist")
    if tls.cert_file:
        try:
            context.load_cert_chain(tls.cert_file, tls.key_file, password=lambda: _refuse_password(tls, setting))
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"--{setting}-cert-file {tls.cert_file} and --{setting}-key-file {tls.key_file} do not load as a pair "
                f"of PEM files: {error}"
            ) from None
    if tls.ca_file:
        try:
            context.load_verify_locations(tls.ca_file)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"--{setting}-ca-file {tls.ca_file} has no PEM certificate: {error}") from None


def _refuse_password(tls: TlsConfig, setting: str) -> NoReturn:
    # Without this, OpenSSL would prompt on the terminal.
    raise ConfigError(f"--{setting}-key-file {tls.key_file} is encrypted; use a key without a passphrase")


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
