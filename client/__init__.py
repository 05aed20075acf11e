"""The Python client and the `outrider` command. Speaks gRPC; imports no service and no torch.

    from client import OutriderClient, SamplingParams

    with OutriderClient("127.0.0.1:8001") as client:
        print(client.generate("def fibonacci(n):", SamplingParams(temperature=0, max_tokens=64)).text)

AsyncOutriderClient has the same methods: `generate`, `stream`, `batch`. Errors are those of shared/errors.py.
"""

from client.api_async import AsyncOutriderClient
from client.api_params import SamplingParams, Speculation, StructuredOutputsParams
from client.api_results import BatchFailed, Completion, Logprob, SpeculationFigures, Token, Update, Usage
from client.api_sync import OutriderClient

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
