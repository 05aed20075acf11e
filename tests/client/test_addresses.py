"""`--url` and `--address` of `chat` and `complete`: what is wrong with them, in one line and before anything else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from command import outrider

from outrider.client.cli.common import grpc_target
from outrider.shared.errors import OutriderError
from tests.ports import nobodys_port


@pytest.fixture
def website() -> Iterator[str]:
    """host:port of an HTTP server that has no page."""
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("address", "url", "said"),
    [
        ("localhost", "", "--address: localhost is not host:port of a gateway's gRPC server; --url takes"),
        ("http://a:8001", "", "--address: http://a:8001 is not host:port .*; give --url http://a:8001"),
        ("a:1,b", "", "--address: b is not host:port"),
        ("a:1", "http://b", "--url http://b and --address a:1 are both given"),
        ("", "a:8000", r"'a:8000' is not a URL \(--url, --base-url or OPENAI_BASE_URL\): it must begin with http://"),
        ("", "", "no stack is running here; start one with `outrider up` or give --url, --address or OPENAI_BASE_URL"),
    ],
)
def test_what_cannot_be_an_address(
    address: str, url: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(OutriderError, match=said):
        grpc_target(address, url, "", None, tmp_path)


@pytest.mark.parametrize("address", ["a:1", "a.b-c:65535, [::1]:8001", "unix:/tmp/socket"])
def test_addresses(address: str, tmp_path: Path) -> None:
    assert grpc_target(address, "", "key", None, tmp_path) == (address, "key")


def test_nothing_listens_there() -> None:
    address = f"127.0.0.1:{nobodys_port()}"
    done = outrider("complete", "hi", "--address", address)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"outrider: {address}: nothing listens there; a gateway's gRPC port is its HTTP port plus 1"
    )
    assert done.stderr.count("\n") == 1


def test_a_server_of_another_kind(website: str) -> None:
    done = outrider("chat", "hi", "--address", website)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"{website}: an HTTP server, not a gRPC server, listens there; give it as --url" in done.stderr
    done = outrider("complete", "hi", "--url", f"http://{website}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"http://{website} has no /fleet (is it an Outrider gateway?)" in done.stderr
