"""`outrider load-draft`: new weights for the drafting of verifiers that serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from outrider.client.api.access import Access
from outrider.client.cli.common import (
    DEFAULT_RUN_DIR,
    Json,
    RunDir,
    TlsCaFile,
    TlsCertFile,
    TlsKeyFile,
    clear_errors,
    console,
    print_json,
    running_stack,
)
from outrider.shared.errors import InvalidRequest, Unavailable
from outrider.shared.tls import client_tls
from outrider.v1 import verifier_pb2, verifier_pb2_grpc

# seconds; reading and warming a draft's weights, those of a model of some GB too
_TIMEOUT_S = 600.0

Verifiers = Annotated[str, typer.Option(help="Verifiers, comma-separated; empty: those of the running stack.")]


def load_draft(
    path: Annotated[str, typer.Argument(help="Folder of a head or draft model, on the verifiers' machines.")],
    verifiers: Verifiers = "",
    tls_ca_file: TlsCaFile = "",
    tls_cert_file: TlsCertFile = "",
    tls_key_file: TlsKeyFile = "",
    run_dir: RunDir = DEFAULT_RUN_DIR,
    as_json: Json = False,
) -> None:
    """Load other weights of the same shape for the drafting of verifiers that serve with --allow-draft-loading.

    Requests that begin from then on are drafted for with them; no output depends on a draft.

    Example: outrider load-draft runs/eagle3/head
    """
    with clear_errors():
        access = Access(tls=client_tls(tls_cert_file, tls_key_file, tls_ca_file, setting="tls"))
        addresses = [part for part in verifiers.split(",") if part]
        addresses = addresses or running_stack(run_dir, "--verifiers").verifiers
        folder = str(Path(path).resolve()) if Path(path).exists() else path
        loaded = [_load(access, address, folder) for address in addresses]
        if as_json:
            print_json({"loaded": loaded})
            return
        for draft in loaded:
            text = "{verifier} drafts with {method} ({model}), version {version}".format(**draft)
            console.print(text, markup=False, soft_wrap=True)


def _load(access: Access, address: str, path: str) -> dict[str, Any]:
    with access.channel(address) as channel:
        stub = verifier_pb2_grpc.VerifierStub(channel)
        try:
            info = stub.LoadDraft(verifier_pb2.LoadDraftRequest(path=path), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidRequest(f"{address}: {error.details()}") from None
            is_away = error.code() is grpc.StatusCode.UNAVAILABLE
            advice = "no verifier answers there; give the gRPC addresses of verifiers" if is_away else error.details()
            raise Unavailable(f"{address}: {advice}") from None
    return {"verifier": address, "method": info.name, "model": info.model, "version": info.version}
