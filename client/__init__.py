"""The Python client and the `outrider` command. Speaks gRPC; imports no service and no torch.

    from outrider import OutriderClient, SamplingParams

    with OutriderClient("127.0.0.1:8001") as client:
        print(client.generate("def fibonacci(n):", SamplingParams(temperature=0, max_tokens=64)).text)

AsyncOutriderClient has the same methods: `generate`, `stream`, `batch`. Errors are those of shared/errors.py.

Names are loaded when they are first asked for: the `outrider` command starts here too, and must not wait for gRPC.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.client.api.asynchronous import AsyncOutriderClient
    from outrider.client.api.blocking import OutriderClient
    from outrider.client.api.results import BatchFailed, Completion, Logprob, SpeculationFigures, Token, Update, Usage
    from outrider.shared.request_params import SamplingParams, Speculation, StructuredOutputsParams

__all__ = [
    "AsyncOutriderClient",
    "BatchFailed",
    "Completion",
    "Logprob",
    "OutriderClient",
    "SamplingParams",
    "Speculation",
    "SpeculationFigures",
    "StructuredOutputsParams",
    "Token",
    "Update",
    "Usage",
]

_HOMES = {
    "AsyncOutriderClient": "outrider.client.api.asynchronous",
    "OutriderClient": "outrider.client.api.blocking",
    **dict.fromkeys(
        ("BatchFailed", "Completion", "Logprob", "SpeculationFigures", "Token", "Update", "Usage"),
        "outrider.client.api.results",
    ),
    **dict.fromkeys(("SamplingParams", "Speculation", "StructuredOutputsParams"), "outrider.shared.request_params"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *_HOMES))
