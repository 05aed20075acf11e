"""Outrider's one import name. The folders next to this file are links to those of the repository's root.

    from outrider import LLM, SamplingParams                     # offline: needs the extra `engine`; also AsyncLLM
    from outrider import OutriderClient, AsyncOutriderClient     # a client of a running gateway: needs no torch

Names are loaded when they are first asked for, so the client's wheel, which has no engine, can have this file too.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.client import AsyncOutriderClient, OutriderClient
    from outrider.offline import LLM, AsyncEngineArgs, AsyncLLM, TextPrompt, TokensPrompt
    from outrider.shared.request_params import SamplingParams, StructuredOutputsParams

# On a system without links, where git writes files in their place, the folders are found where they stand.
if not (Path(__file__).parent / "shared").is_dir():
    __path__.append(str(Path(__file__).resolve().parents[1]))

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncOutriderClient",
    "OutriderClient",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

_HOMES = {
    **dict.fromkeys(("LLM", "AsyncEngineArgs", "AsyncLLM", "TextPrompt", "TokensPrompt"), "outrider.offline"),
    **dict.fromkeys(("SamplingParams", "StructuredOutputsParams"), "outrider.shared.request_params"),
    "AsyncOutriderClient": "outrider.client",
    "OutriderClient": "outrider.client",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *_HOMES))
