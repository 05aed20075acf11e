"""A target and its drafts in this process, with vLLM's arguments: what LLM and AsyncLLM have in common."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from outrider.engine.model.local_model import local_model
from outrider.gateway.request.served import RequestLimits, Served, ServedModel
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.offline.arguments import check_other_arguments, checked_config, default_params, dtype_name
from outrider.offline.generation import OfflineGeneration
from outrider.offline.metrics import Metric, snapshot
from outrider.offline.progress import LoadProgress
from outrider.offline.prompts import Preparation
from outrider.offline.speculation import SpeculationPlan, plan_speculation
from outrider.shared.checkpoint.hub import with_revision
from outrider.shared.errors import ConfigError
from outrider.shared.request_params import SamplingParams
from outrider.verifier_service.config import VerifierConfig

if TYPE_CHECKING:
    from outrider.offline.engines import Engines

# A batch job has no other users to protect from a large n.
_LIMITS = RequestLimits(max_n=16384, max_sequences=16384)
# vLLM's default on most devices is 256; each holds KV cache from its start to its end.
_MAX_NUM_SEQS = 64


class OfflineEngine:
    """A target and its draft methods, ready to generate; `close` it, or use it in a `with`.

    model: folder of the target's checkpoint, .gguf file or Hub id. revision: branch, tag or commit of a Hub id.
    speculative_config: vLLM's keys; None: no speculation. A draft checkpoint's kind is detected; method "mtp" drafts
    with the target's own MTP layer. With a `method` by name, rounds draft `num_speculative_tokens`; without one (or
    with "auto"), the number that pays. seed: makes whole programs repeatable; each request without its own seed draws
    one from it. max_num_seqs: outputs decoded concurrently, for any batch size; None: 64. kv_cache_mb: the target's;
    0: 512 on the CPU, on a GPU what the share gpu_memory_utilization leaves.
    kv_cache_dtype: "auto": the weights'; "fp8" or "int8": 8 bits and a scale per token and head.
    packed_arithmetic: of quantised weights; "int8": activations in 8 bits too, "bf16": as stored, "auto": by the file.
    num_threads: 0: all cores. generation_config: folder of the generation_config.json for prompts without sampling
    parameters; "auto": the model's; "vllm": none. override_generation_config: replaces single values of it.
    use_tqdm_on_load: shows the steps of loading if stderr is a terminal or a notebook.

    vLLM's other arguments are ignored with a warning or refused by name (arguments.py).
    Raises ConfigError, ModelRefused or CheckpointRefused.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        revision: str | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        dtype: object = "auto",
        seed: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int = 512,
        kv_cache_mb: int = 0,
        gpu_memory_utilization: float = 0.9,
        kv_cache_dtype: str = "auto",
        packed_arithmetic: str = "auto",
        enable_prefix_caching: bool = True,
        num_threads: int = 0,
        tensor_parallel_size: int = 1,
        device: str = "auto",
        enforce_eager: bool = False,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        use_tqdm_on_load: bool = True,
        **other_arguments: Any,
    ) -> None:
        check_other_arguments(other_arguments)
        model = local_model(with_revision(str(model), revision or "", "LLM: revision"), "model")
        plan = plan_speculation(speculative_config, model)
        self._max_num_seqs = _MAX_NUM_SEQS if max_num_seqs is None else max_num_seqs
        self._default_params = default_params(model, generation_config, override_generation_config)
        shared = {
            "dtype": dtype_name(dtype),
            "device": device,
            "max_num_seqs": self._max_num_seqs,
            "num_threads": num_threads,
            "enforce_eager": enforce_eager,
            "packed_arithmetic": packed_arithmetic,
        }
        target = {
            "model": model,
            "max_model_len": max_model_len or 0,
            "max_num_batched_tokens": max_num_batched_tokens,
            "kv_cache_mb": kv_cache_mb,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_dtype": kv_cache_dtype,
            "enable_prefix_caching": enable_prefix_caching,
            "tensor_parallel_size": tensor_parallel_size,
        }
        verifier_config = _verifier_config(plan, {**shared, **target, "local_enforce_eager": enforce_eager})
        tokenizer = Tokenizer.load(model)
        with LoadProgress(Path(model).name, shown=use_tqdm_on_load) as progress:
            from outrider.offline.engines import start_engines  # loads torch

            engines = start_engines(verifier_config, progress.log)
        self._model = model
        self._hold(engines, plan, tokenizer, seed)

    def _hold(self, engines: Engines, plan: SpeculationPlan, tokenizer: Tokenizer, seed: int | None) -> None:
        self._engines = engines
        self._closing = ExitStack()
        self._closing.callback(engines.close)
        # Scripts written for vLLM never close: then this runs when the engine is dropped, or at exit.
        self._finalizer = weakref.finalize(self, self._closing.close)
        self._generation = OfflineGeneration(engines, plan.config, tokenizer, max_num_seqs=self._max_num_seqs)
        self._served = Served(_served_model(engines), tokenizer, _LIMITS)
        self._preparation = Preparation(self._served, seed)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns a copy of the defaults from the checkpoint and override_generation_config."""
        return replace(self._default_params)

    def get_tokenizer(self) -> Any:
        """Returns transformers' tokenizer of the checkpoint, as vLLM does. Raises ConfigError if it cannot be read."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"transformers cannot read the tokenizer of {self._model}: {error}") from error

    def get_metrics(self) -> list[Metric]:
        """Returns what has been counted so far, under vLLM's names."""
        registries = (self._generation.metrics.registry, self._engines.registry)
        return snapshot(registries, self._engines.target.model)

    def close(self) -> None:
        """Ends what runs and frees the models; may be called again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise ConfigError(f"this {type(self).__name__} is closed")


def _verifier_config(plan: SpeculationPlan, settings: Mapping[str, object]) -> VerifierConfig:
    config: VerifierConfig = checked_config(VerifierConfig, {**settings, **plan.verifier})
    # Not through the check, which would split a path at a comma.
    drafts = (plan.draft_model,) if plan.draft_model else ()
    return replace(config, local_methods=plan.methods, local_draft_model=drafts)


def _served_model(engines: Engines) -> ServedModel:
    target = engines.target
    return ServedModel(
        target.model,
        target.max_model_len,
        target.vocab_size,
        tuple(sorted(method.name for method in target.local_methods)),
    )
