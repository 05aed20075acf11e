"""vLLM's LLM on the engines and the decode loop of the services, in one process. Not here: beam search, embeddings."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from drafter_service.config import DrafterConfig
from gateway.openai_convert import Served
from gateway.service import RequestLimits, ServedModel
from gateway.tokenizer import Tokenizer
from offline.arguments import check_other_arguments, checked_config, dtype_name
from offline.batch import run_batch
from offline.event_loop import EventLoopThread
from offline.generation import OfflineGeneration
from offline.outputs import RequestOutput
from offline.progress import BatchProgress
from offline.prompts import Preparation, Prompt
from offline.sampling_params import SamplingParams
from offline.speculation import SpeculationPlan, plan_speculation
from shared.errors import ConfigError, InvalidRequest
from verifier_service.config import VerifierConfig

if TYPE_CHECKING:
    from offline.engines import Engines

# A batch job has no neighbours to protect from a large n.
_LIMITS = RequestLimits(max_n=16384, max_sequences=16384)


class LLM:
    """A target, and what drafts for it, ready to generate; `close` it, or use it in a `with`.

    model: folder of the target's checkpoint. speculative_config: vLLM's keys; None speculates nothing. A draft
    checkpoint's kind is recognised; a `method` by name drafts `num_speculative_tokens` a round, without one (or with
    "auto") as many as pay. seed: makes whole programs repeatable; each request without a seed of its own draws one
    from it. max_num_seqs: outputs decoded at a time, whatever the batch's length. kv_cache_mb: of the target.
    num_threads: 0 takes every core.

    Other arguments of vLLM's are ignored with a warning or refused by name (arguments.py).
    Raises ConfigError, ModelRefused or CheckpointRefused.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        dtype: object = "auto",
        seed: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        kv_cache_mb: int = 512,
        enable_prefix_caching: bool = True,
        num_threads: int = 0,
        tensor_parallel_size: int = 1,
        device: str = "cpu",
        enforce_eager: bool = False,
        **other_arguments: Any,
    ) -> None:
        check_other_arguments(other_arguments)
        plan = plan_speculation(speculative_config)
        shared = {
            "dtype": dtype_name(dtype),
            "device": device,
            "max_num_seqs": max_num_seqs,
            "num_threads": num_threads,
            "enforce_eager": enforce_eager,
        }
        target = {
            "model": model,
            "max_model_len": max_model_len or 0,
            "max_num_batched_tokens": max_num_batched_tokens,
            "kv_cache_mb": kv_cache_mb,
            "enable_prefix_caching": enable_prefix_caching,
            "tensor_parallel_size": tensor_parallel_size,
        }
        verifier_config = checked_config(VerifierConfig, {**shared, **target, **plan.verifier})
        drafter_config = _drafter_config(plan, str(model), shared)
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
        from offline.engines import start_engines  # torch, from here on

        with ExitStack() as stack:
            engines = start_engines(verifier_config, drafter_config)
            stack.callback(engines.close)
            self._loop = EventLoopThread("offline")
            stack.callback(self._loop.stop)
            self._generation = OfflineGeneration(engines, plan.config, tokenizer, max_num_seqs=self._max_num_seqs)
            self._preparation = Preparation(Served(_served_model(engines), tokenizer, _LIMITS), seed)
            # Scripts written for vLLM never close: then it is done when the LLM is dropped, or at exit.
            self._finalizer = weakref.finalize(self, stack.pop_all().close)

    def generate(
        self,
        prompts: object,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in their order.

        prompts: text, {"prompt": text} or {"prompt_token_ids": [...]}, one or a list of them. sampling_params: one for
        all, or one each. use_tqdm: True or False; None shows the progress where stderr is a terminal.

        A prompt that fails stops no other: GenerationFailed is raised when all have ended, and has their outputs.
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
        """`generate` on one conversation, or a list of them, written out by the checkpoint's own chat template."""
        entries = _list("messages", messages)
        conversations = [entries] if entries and isinstance(entries[0], Mapping) else entries
        template = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        return self._run([Prompt(entry, template) for entry in conversations], sampling_params, use_tqdm)

    def close(self) -> None:
        """Ends what runs and frees the models; harmless when called again."""
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
            raise ConfigError("this LLM has been closed")
        params = sampling_params if sampling_params is not None else SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequest(
                f"{len(prompts)} prompts, but {len(each)} sampling_params: give one for all, or one each",
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
    # Not through the check: it would take a comma in a path for two paths.
    return replace(config, methods=plan.methods, draft_model=(plan.draft_model,) if plan.draft_model else ())


def _served_model(engines: Engines) -> ServedModel:
    target = engines.target
    return ServedModel(target.model, target.max_model_len, target.vocab_size, tuple(sorted(engines.methods)))


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequest(f"{name} must be a list, got {type(value).__name__}", param=name)
    return list(value)
