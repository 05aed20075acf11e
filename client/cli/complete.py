"""`outrider complete`: one completion, streamed over gRPC, with draft tokens marked."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from outrider.client.cli.common import (
    DEFAULT_RUN_DIR,
    Address,
    ApiKey,
    Json,
    Method,
    NumSpeculativeTokens,
    Prediction,
    RunDir,
    TlsCaFile,
    TlsCertFile,
    TlsKeyFile,
    Url,
    clear_address,
    clear_errors,
    console,
    grpc_target,
    predicted_text,
    print_json,
)
from outrider.client.display import LEGEND, announced, show_stream, summary
from outrider.client.generate import Access, CompletionRequest, StreamEnd, stream_completion
from outrider.shared.tls import client_tls


def complete(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    method: Method = "auto",
    num_speculative_tokens: NumSpeculativeTokens = 0,
    prediction: Prediction = None,
    url: Url = "",
    address: Address = "",
    api_key: ApiKey = "",
    tls_ca_file: TlsCaFile = "",
    tls_cert_file: TlsCertFile = "",
    tls_key_file: TlsKeyFile = "",
    run_dir: RunDir = DEFAULT_RUN_DIR,
    as_json: Json = False,
) -> None:
    """Stream a completion; draft tokens are marked.

    Examples:

      outrider complete "import os" --method ngram --max-tokens 64

      outrider complete "import os" --url https://llm.example --api-key "$KEY"

      outrider complete "import os" --json | jq .speculation
    """
    with clear_errors():
        tls = client_tls(tls_cert_file, tls_key_file, tls_ca_file, setting="tls")
        address, api_key = grpc_target(address, url, api_key, tls, run_dir)
        request = CompletionRequest(
            prompt,
            max_tokens,
            temperature,
            seed,
            method,
            num_speculative_tokens,
            prediction=predicted_text(prediction),
        )
        access = Access(api_key, tls)
        with clear_address(address):
            if as_json:
                print_json(_collected(address, request, access))
                return
            stream = announced(stream_completion(address, request, access), lambda: console.print(LEGEND))
            figures = show_stream(console, stream, time.perf_counter)
        console.print(summary(figures))


def _collected(address: str, request: CompletionRequest, access: Access) -> dict[str, Any]:
    """The whole answer; `tokens` has each token's origin."""
    tokens, end = [], None
    started = time.perf_counter()
    for item in stream_completion(address, request, access):
        if isinstance(item, StreamEnd):
            end = item
        else:
            tokens.append(item)
    return {
        "text": "".join(token.text for token in tokens),
        "tokens": [asdict(token) for token in tokens],
        "seconds": time.perf_counter() - started,
        **(asdict(end) if end else {}),
    }
