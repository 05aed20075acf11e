"""Offline use, as in vLLM's documentation: a whole batch in one process, without services, sockets or Redis.

    from outrider import LLM, SamplingParams

    with LLM(model="models/demo-target", speculative_config={"model": "models/demo-draft"}) as llm:
        outputs = llm.generate(["def fibonacci(n):"], SamplingParams(temperature=0.0, max_tokens=64))

AsyncLLM takes requests one by one. Importing this does not load torch; creating an LLM does.
"""

from outrider.offline.async_llm import AsyncEngineArgs, AsyncLLM
from outrider.offline.errors import GenerationFailed
from outrider.offline.llm import LLM
from outrider.offline.metrics import Counter, Gauge, Histogram, Metric, Vector
from outrider.offline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from outrider.offline.prompts import TextPrompt, TokensPrompt
from outrider.shared.request_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "CompletionOutput",
    "Counter",
    "Gauge",
    "GenerationFailed",
    "Histogram",
    "Logprob",
    "Metric",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
]
