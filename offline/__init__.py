"""Offline use, as in vLLM's documentation: a whole batch in this process, without services, sockets or Redis.

    from offline import LLM, SamplingParams

    with LLM(model="models/demo-target", speculative_config={"model": "models/demo-draft"}) as llm:
        outputs = llm.generate(["def fibonacci(n):"], SamplingParams(temperature=0.0, max_tokens=64))

Importing this loads no torch; making an LLM does.
"""

from offline.errors import GenerationFailed
from offline.llm import LLM
from offline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from offline.sampling_params import SamplingParams, StructuredOutputsParams

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
