"""Arguments of vLLM's LLM without a meaning here: which are ignored, which are refused, and what to use instead."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from outrider.shared.checkpoint.sampling_defaults import load_sampling_defaults
from outrider.shared.config import load_config
from outrider.shared.errors import ConfigError
from outrider.shared.request_params import SamplingParams

# Ignored with any value; the text says why.
_IGNORED = {
    "swap_space": "sessions are recomputed, not swapped",
    "max_seq_len_to_capture": "the engine chooses its CUDA graphs",
    "max_num_partial_prefills": "prefills are always chunked",
    "compilation_config": "nothing is compiled by torch",
    "distributed_executor_backend": "tensor parallel ranks are processes of this machine",
    "disable_custom_all_reduce": "there is no custom all-reduce",
    "enable_chunked_prefill": "prefills are always chunked",
    "async_scheduling": "the engine plans its own forwards",
    "trust_remote_code": "code from a checkpoint is never run",
    "enable_log_requests": "prompts are never logged",
    "disable_log_requests": "prompts are never logged",
    **dict.fromkeys(
        ("limit_mm_per_prompt", "disable_chunked_mm_input", "allowed_local_media_path"), "prompts are text"
    ),
    "max_parallel_loading_workers": "checkpoints are mapped, not copied",
    "use_v2_block_manager": "there is only one block manager",
}
# Accepted only with these values, which have no effect; the text says what to do otherwise.
_HARMLESS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "disable_log_stats": ((True, False), "get_metrics and the metrics of each output are always there"),
    "tokenizer": ((None,), "the tokenizer is read from the model's folder"),
    "tokenizer_mode": (("auto",), "the tokenizer is read from the model's folder"),
    "skip_tokenizer_init": ((False,), "texts are needed for stop strings; give {'prompt_token_ids': [...]} as prompts"),
    "quantization": ((None,), "leave it out: the checkpoint says how its weights are quantised"),
    "load_format": (("auto", "safetensors"), "the format is recognised by the files"),
    "pipeline_parallel_size": ((1,), "use tensor_parallel_size"),
    "data_parallel_size": ((1,), "start the services, with several verifiers behind one gateway"),
    "cpu_offload_gb": ((0,), "use tensor_parallel_size"),
    "enable_lora": ((False,), "merge the adapter into the checkpoint"),
    "runner": (("auto", "generate"), "only generation is served"),
    "task": (("auto", "generate"), "only generation is served"),
    "tokenizer_revision": ((None,), "the tokenizer is the model's, of the same revision"),
    "code_revision": ((None,), "code from a checkpoint is never run"),
    "download_dir": ((None,), "downloads are kept below HF_HOME: set that variable"),
    "hf_token": ((None,), "set the variable HF_TOKEN"),
    "hf_overrides": ((None, {}), "change config.json in the model's folder"),
    "speculative_model": ((None,), "use speculative_config={'model': ...}"),
    "num_speculative_tokens": ((None,), "use speculative_config={'num_speculative_tokens': ...}"),
    "num_gpu_blocks_override": ((None,), "use kv_cache_mb"),
    "kv_cache_memory_bytes": ((None,), "use kv_cache_mb"),
}


def check_other_arguments(given: Mapping[str, Any]) -> None:
    """Warns of ignored arguments. Raises ConfigError that names a refused argument and what to use instead."""
    for name, value in given.items():
        if name in _IGNORED:
            warnings.warn(f"LLM: {name} is ignored here: {_IGNORED[name]}", UserWarning, stacklevel=3)
        elif name in _HARMLESS:
            harmless, advice = _HARMLESS[name]
            if value not in harmless:
                raise ConfigError(f"LLM: {name}={value!r} is not supported: {advice}", param=name)
        else:
            raise ConfigError(f"LLM: unknown argument {name!r}", param=name)


def dtype_name(dtype: object) -> str:
    """The engine's name of a vLLM dtype name or torch dtype; unknown names are left for the engine to refuse."""
    name = str(dtype).removeprefix("torch.")
    return {"float": "float32"}.get(name, name)


def checked_config(config_type: type[Any], values: Mapping[str, object]) -> Any:
    """A service's config from Python values, checked by the service. Raises ConfigError that names the setting."""
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    try:
        return load_config(config_type, argv, {}, prog="LLM", description="")
    except ConfigError as error:
        raise _of_argument(error) from None


def default_params(model: str, generation_config: str, override: Mapping[str, Any] | None) -> SamplingParams:
    """Returns the parameters of prompts without their own, from the checkpoint's folder `model`. Raises ConfigError."""
    try:
        defaults = load_sampling_defaults(model, generation_config, json.dumps(override or {}, default=str))
    except ConfigError as error:
        raise _of_argument(error) from None
    return SamplingParams(
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
        max_tokens=defaults.max_tokens or SamplingParams.max_tokens,
    )


def _of_argument(error: ConfigError) -> ConfigError:
    """A service's error with the argument's name instead of the flag's."""
    flag, _, reason = error.message.partition(":")
    name = flag.removeprefix("--").replace("-", "_")
    return ConfigError(f"LLM: {name}:{reason}", param=name)
