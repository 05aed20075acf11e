"""A drafter for TensorRT-LLM: `UserProvidedDecodingConfig(drafter=outrider.tensorrt_llm.Drafter(...), ...)`."""

from outrider.plugins.tensorrt_llm import Drafter

__all__ = ["Drafter"]
