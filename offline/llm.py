"""vLLM's LLM over the services' engines and decode loop, in one process. Not here: beam search, embeddings."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from outrider.drafter_service.config import DrafterConfig
from outrider.engine.model.local_model import local_model
from outrider.gateway.request.served import RequestLimits, Served, ServedModel
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.offline.arguments import check_other_arguments, checked_config, default_params, dtype_name
from outrider.offline.batch import run_batch
from outrider.offline.event_loop import EventLoopThread
from outrider.offline.generation import OfflineGeneration
from outrider.offline.outputs import RequestOutput
from outrider.offline.progress import BatchProgress
from outrider.offline.prompts import Preparation, Prompt
from outrider.offline.speculation import SpeculationPlan, plan_speculation
from outrider.shared.checkpoint.hub import with_revision
from outrider.shared.errors import ConfigError, InvalidRequest
from outrider.shared.request_params import SamplingParams
from outrider.verifier_service.config import VerifierConfig

if TYPE_CHECKING:
    from outrider.offline.engines import Engines

# A batch job has no other users to protect from a large n.
_LIMITS = RequestLimits(max_n=16384, max_sequences=16384)


class LLM:
    """A target and its draft methods, ready to generate; `close` it, or use it in a `with`.

    model: folder of the target's checkpoint, .gguf file or Hub id. revision: branch, tag or commit of a Hub id.
    speculative_config: vLLM's keys; None: no speculation. A draft checkpoint's kind is detected; method "mtp" drafts
    with the target's own MTP layer. With a `method` by name, rounds draft `num_speculative_tokens`; without one (or
    with "auto"), the number that pays. seed: makes whole programs repeatable; each request without its own seed draws
    one from it. max_num_seqs: outputs decoded concurrently, for any batch size. kv_cache_mb: the target's.
    kv_cache_dtype: "auto": the weights'; "fp8" or "int8": 8 bits and a scale per token and head.
    packed_arithmetic: of quantised weights; "int8": activations in 8 bits too, "bf16": as stored, "auto": by the file.
    num_threads: 0: all cores. generation_config: folder of the generation_config.json for prompts without sampling
    parameters; "auto": the model's; "vllm": none. override_generation_config: replaces single values of it.

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
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        kv_cache_mb: int = 512,
        kv_cache_dtype: str = "auto",
        packed_arithmetic: str = "auto",
        enable_prefix_caching: bool = True,
        num_threads: int = 0,
        tensor_parallel_size: int = 1,
        device: str = "cpu",
        enforce_eager: bool = False,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        **other_arguments: Any,
    ) -> None:
        check_other_arguments(other_arguments)
        model = local_model(with_revision(str(model), revision or "", "LLM: revision"), "model")
        plan = plan_speculation(speculative_config, model)
        self._default_params = default_params(model, generation_config, override_generation_config)
        shared = {
            "dtype": dtype_name(dtype),
            "device": device,
            "max_num_seqs": max_num_seqs,
            "num_threads": num_threads,
            "enforce_eager": enforce_eager,
            "packed_arithmetic": packed_arithmetic,
        }
        target = {
            "model": model,
            "max_model_len": max_model_len or 0,
            "max_num_batched_tokens": max_num_batched_tokens,
            "kv_cache_mb": kv_cache_mb,
            "kv_cache_dtype": kv_cache_dtype,
            "enable_prefix_caching": enable_prefix_caching,
            "tensor_parallel_size": tensor_parallel_size,
        }
        verifier_config = checked_config(VerifierConfig, {**shared, **target, **plan.verifier})
        drafter_config = _drafter_config(plan, model, shared)
        tokenizer = Tokenizer.load(model)
        self._max_num_seqs = max_num_seqs
        self._start(verifier_config, drafter_config, plan, tokenizer, seed)

    def _start(
        self,
        verifier_config: VerifierConfig,
        drafter_config: DrafterConfig | None,
        plan: SpeculationPlan,
        tokenizer: Tokenizer,
        seed: int | None,
    ) -> None:
        from outrider.offline.engines import start_engines  # loads torch

        with ExitStack() as stack:
            engines = start_engines(verifier_config, drafter_config)
            stack.callback(engines.close)
            self._loop = EventLoopThread("offline")
            stack.callback(self._loop.stop)
            self._generation = OfflineGeneration(engines, plan.config, tokenizer, max_num_seqs=self._max_num_seqs)
            self._preparation = Preparation(Served(_served_model(engines), tokenizer, _LIMITS), seed)
            # Scripts written for vLLM never close: then this runs when the LLM is dropped, or at exit.
            self._finalizer = weakref.finalize(self, stack.pop_all().close)

    def generate(
        self,
        prompts: object,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in order.

        prompts: text, {"prompt": text} or {"prompt_token_ids": [...]}, one or a list. sampling_params: one for all, or
        one per prompt; None: get_default_sampling_params(). use_tqdm: True or False; None shows progress if stderr is a
        terminal.

        A failing prompt stops no other: GenerationFailed is raised when all have ended, and has their outputs.
        """
        entries = [prompts] if isinstance(prompts, str | Mapping) else _list("prompts", prompts)
        return self._run([Prompt(entry) for entry in entries], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """`generate` on one conversation, or a list of them, rendered by the checkpoint's chat template."""
        entries = _list("messages", messages)
        conversations = [entries] if entries and isinstance(entries[0], Mapping) else entries
        template = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        return self._run([Prompt(entry, template) for entry in conversations], sampling_params, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns a copy of the defaults from the checkpoint and override_generation_config."""
        return replace(self._default_params)

    def close(self) -> None:
        """Ends what runs and frees the models; may be called again."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        if not self._finalizer.alive:
            raise ConfigError("this LLM is closed")
        params = sampling_params if sampling_params is not None else self.get_default_sampling_params()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequest(
                f"{len(prompts)} prompts, but {len(each)} sampling_params: give one for all, or one per prompt",
                param="sampling_params",
            )
        with BatchProgress(len(prompts), use_tqdm) as progress:
            work = run_batch(
                self._generation,
                self._preparation,
                list(zip(prompts, each, strict=True)),
                progress,
                max_num_requests=self._max_num_seqs,
            )
            return self._loop.run(work)


def _drafter_config(plan: SpeculationPlan, model: str, shared: Mapping[str, object]) -> DrafterConfig | None:
    if not plan.methods:
        return None
    config: DrafterConfig = checked_config(DrafterConfig, {**shared, "target_model": model, **plan.drafter})
    # Not through the check, which would split a path at a comma.
    return replace(config, methods=plan.methods, draft_model=(plan.draft_model,) if plan.draft_model else ())


def _served_model(engines: Engines) -> ServedModel:
    target = engines.target
    return ServedModel(target.model, target.max_model_len, target.vocab_size, tuple(sorted(engines.methods)))


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequest(f"{name} must be a list, got {type(value).__name__}", param=name)
    return list(value)
