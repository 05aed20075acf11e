"""`outrider reload`: other weights for the target of verifiers that serve."""

from __future__ import annotations

import time
from typing import Annotated, Any

import grpc
import typer

from outrider.client.api.access import Access, refusal_by
from outrider.client.cli.common import (
    DEFAULT_RUN_DIR,
    ApiKey,
    Json,
    RunDir,
    TlsCaFile,
    TlsCertFile,
    TlsKeyFile,
    Url,
    clear_errors,
    console,
    path_for_services,
    print_json,
    running_stack,
)
from outrider.client.fleet import read_fleet
from outrider.client.rest import rest_client
from outrider.shared.errors import Overloaded, Unavailable
from outrider.shared.tls import TlsConfig, client_tls
from outrider.v1 import verifier_pb2, verifier_pb2_grpc

# seconds; reading, checking and certifying weights of some GB, beside what the drain takes
_TIMEOUT_S = 1800.0
# seconds; a gateway looks at its verifiers each second
_GATEWAY_TIMEOUT_S = 30.0
_LOOK_AGAIN_S = 0.1

Verifiers = Annotated[str, typer.Option(help="Verifiers, comma-separated. Left out: the running stack's.")]
DrainS = Annotated[
    float,
    typer.Option(min=0.0, max=3600.0, help="Seconds that running answers may go on with the weights they began with."),
]


def reload(
    path: Annotated[str, typer.Argument(help="Folder or .gguf file of the target, on the verifiers' machines.")],
    verifiers: Verifiers = "",
    drain_s: DrainS = 30.0,
    url: Url = "",
    api_key: ApiKey = "",
    tls_ca_file: TlsCaFile = "",
    tls_cert_file: TlsCertFile = "",
    tls_key_file: TlsKeyFile = "",
    run_dir: RunDir = DEFAULT_RUN_DIR,
    as_json: Json = False,
) -> None:
    """Replace the target's weights in verifiers that serve with --allow-target-reload, one after another.

    For weights of the same config, as training makes them. New requests wait for the new weights, or go to another
    verifier; what still runs after --drain-s ends with an error. Returns once the gateway knows of them too: the
    running stack's, or with --verifiers the one at --url.

    Example: outrider reload runs/grpo/step-200
    """
    with clear_errors():
        tls = client_tls(tls_cert_file, tls_key_file, tls_ca_file, setting="tls")
        addresses = [address for address in verifiers.split(",") if address]
        if not addresses:
            stack = running_stack(run_dir, "--verifiers")
            addresses, url = stack.verifiers, url or stack.url
        reloaded = [_load(Access(tls=tls), address, path_for_services(path), drain_s) for address in addresses]
        if url:
            _wait_for_gateway(url, api_key, tls, reloaded)
        if as_json:
            print_json({"reloaded": reloaded})
            return
        for target in reloaded:
            text = "{address} serves {path}, version {target_version} ({numerics})".format(**target)
            console.print(text, markup=False, soft_wrap=True)


def _load(access: Access, address: str, path: str, drain_s: float) -> dict[str, Any]:
    with access.channel(address) as channel:
        request = verifier_pb2.LoadTargetRequest(path=path, drain_s=drain_s)
        try:
            reply = verifier_pb2_grpc.VerifierStub(channel).LoadTarget(request, timeout=drain_s + _TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise Overloaded(f"{address}: {error.details()}") from None
            raise refusal_by("verifier", address, error) from None
    return {
        "address": address,
        "path": path,
        "numerics": reply.numerics,
        "target_version": reply.target_version,
    }


def _wait_for_gateway(url: str, api_key: str, tls: TlsConfig | None, reloaded: list[dict[str, Any]]) -> None:
    """Raises Unavailable if the gateway does not see as many verifiers of the new kinds in time."""
    wanted = {target["numerics"] for target in reloaded}
    deadline = time.monotonic() + _GATEWAY_TIMEOUT_S
    with rest_client(url, api_key, tls) as client:
        while sum(member["numerics"] in wanted for member in read_fleet(client)["verifiers"]) < len(reloaded):
            if time.monotonic() >= deadline:
                raise Unavailable(f"{url} does not see the new weights after {_GATEWAY_TIMEOUT_S:g} s; is it theirs?")
            time.sleep(_LOOK_AGAIN_S)
