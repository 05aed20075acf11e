"""The name that vLLM is given: `vllm serve ... --speculative-config '{"model": "outrider.vllm.Proposer", ...}'`."""

from outrider.plugins.vllm import Proposer

__all__ = ["Proposer"]
