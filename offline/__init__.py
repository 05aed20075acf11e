"""Offline use, as in vLLM's documentation: a whole batch in one process, without services, sockets or Redis.

    from outrider import LLM, SamplingParams

    with LLM(model="models/demo-target", speculative_config={"model": "models/demo-draft"}) as llm:
        outputs = llm.generate(["def fibonacci(n):"], SamplingParams(temperature=0.0, max_tokens=64))

Importing this does not load torch; creating an LLM does.
"""

from outrider.offline.errors import GenerationFailed
from outrider.offline.llm import LLM
from outrider.offline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from outrider.shared.request_params import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "GenerationFailed",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]
