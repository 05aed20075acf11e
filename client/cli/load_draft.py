"""`outrider load-draft`: new weights for the drafting of verifiers and drafters that serve."""

from __future__ import annotations

from typing import Annotated, Any

import grpc
import typer

from outrider.client.api.access import Access, refusal_by
from outrider.client.cli.common import (
    DEFAULT_RUN_DIR,
    Json,
    RunDir,
    TlsCaFile,
    TlsCertFile,
    TlsKeyFile,
    clear_errors,
    console,
    path_for_services,
    print_json,
    running_stack,
)
from outrider.shared.draft_policy.named_drafts import with_paths
from outrider.shared.tls import client_tls
from outrider.v1 import common_pb2, drafter_pb2_grpc, verifier_pb2_grpc

# seconds; reading and warming a draft's weights, those of a model of some GB too
_TIMEOUT_S = 600.0

_PATH = "Folder of a head or draft model, on those services' machines; NAME=FOLDER for one of several heads."
Verifiers = Annotated[str, typer.Option(help="Verifiers, comma-separated. Without either: the running stack's.")]
Drafters = Annotated[str, typer.Option(help="Drafters, comma-separated.")]


def load_draft(
    path: Annotated[str, typer.Argument(help=_PATH)],
    verifiers: Verifiers = "",
    drafters: Drafters = "",
    tls_ca_file: TlsCaFile = "",
    tls_cert_file: TlsCertFile = "",
    tls_key_file: TlsKeyFile = "",
    run_dir: RunDir = DEFAULT_RUN_DIR,
    as_json: Json = False,
) -> None:
    """Load other weights of the same shape into verifiers or drafters that serve with --allow-draft-loading.

    Requests that begin from then on are drafted for with them; no output depends on a draft.

    Example: outrider load-draft runs/eagle3/head
    """
    with clear_errors():
        access = Access(tls=client_tls(tls_cert_file, tls_key_file, tls_ca_file, setting="tls"))
        services = [*_named("verifier", verifiers), *_named("drafter", drafters)]
        if not services:
            stack = running_stack(run_dir, "--verifiers")
            kind = "drafter" if stack.drafters else "verifier"  # those that draft
            services = [(kind, address) for address in stack.drafters or stack.verifiers]
        (folder,) = with_paths([path], path_for_services)
        loaded = [_load(access, kind, address, folder) for kind, address in services]
        if as_json:
            print_json({"loaded": loaded})
            return
        for draft in loaded:
            text = "{address} drafts with {method} ({model}), version {version}".format(**draft)
            console.print(text, markup=False, soft_wrap=True)


def _named(kind: str, addresses: str) -> list[tuple[str, str]]:
    return [(kind, address) for address in addresses.split(",") if address]


def _load(access: Access, kind: str, address: str, path: str) -> dict[str, Any]:
    with access.channel(address) as channel:
        is_drafter = kind == "drafter"
        stub = drafter_pb2_grpc.DrafterStub(channel) if is_drafter else verifier_pb2_grpc.VerifierStub(channel)
        try:
            info = stub.LoadDraft(common_pb2.LoadDraftRequest(path=path), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise refusal_by(kind, address, error) from None
    return {"kind": kind, "address": address, "method": info.name, "model": info.model, "version": info.version}
