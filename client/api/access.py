"""Access to gateways: addresses, API key, TLS. Shared by blocking and asyncio channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from outrider.shared.errors import InvalidRequest, OutriderError, Unavailable
from outrider.shared.rpc import CHANNEL_OPTIONS, open_channel
from outrider.shared.tls import TlsConfig, channel_credentials


@dataclass(frozen=True)
class Access:
    """An API key and TLS settings; tls None is plaintext."""

    api_key: str = ""
    tls: TlsConfig | None = None

    def channel(self, address: str) -> grpc.Channel:
        if self.tls is None:
            return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(address, channel_credentials(self.tls), options=CHANNEL_OPTIONS)

    def aio_channel(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, self.tls)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def parsed_addresses(address: str | Sequence[str]) -> tuple[str, ...]:
    """Returns host:port addresses from a comma-separated string or a list. Raises InvalidRequest when there is none."""
    parts = address.split(",") if isinstance(address, str) else address
    addresses = tuple(part.strip() for part in parts if part.strip())
    if not addresses:
        raise InvalidRequest("no gateway address was given", param="address")
    return addresses


def refusal_by(kind: str, address: str, error: grpc.RpcError) -> OutriderError:
    """Returns what a service of the kind, "verifier" or "drafter", has refused, or that it does not answer."""
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest(f"{address}: {error.details()}")
    is_away = error.code() is grpc.StatusCode.UNAVAILABLE
    advice = f"no {kind} answers there; give the gRPC addresses of {kind}s" if is_away else error.details()
    return Unavailable(f"{address}: {advice}")
