"""Arguments of vLLM's LLM that mean nothing here: which may stay, which must go, and what to use instead."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from shared.config import load_config
from shared.errors import ConfigError

# Any value may stay: it tunes what works by itself here, or differently.
_IGNORED = {
    "gpu_memory_utilization": "the KV cache takes kv_cache_mb",
    "swap_space": "sessions are computed again, not swapped",
    "max_seq_len_to_capture": "CUDA graphs are chosen by the engine",
    "max_num_partial_prefills": "prefills are cut into chunks as they fit",
    "compilation_config": "nothing is compiled by torch",
    "distributed_executor_backend": "tensor parallel ranks are processes of this machine",
    "disable_custom_all_reduce": "there is none",
    "enable_chunked_prefill": "prefills are always cut into chunks",
    "async_scheduling": "drafting and verifying overlap by themselves",
    "disable_log_stats": "each output carries its own figures",
    "max_parallel_loading_workers": "checkpoints are mapped, not copied",
    "use_v2_block_manager": "there is one",
}
# Only these values, which ask for nothing, may stay; the text says what to do about others.
_HARMLESS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((False,), "code from a checkpoint is never run"),
    "tokenizer": ((None,), "the tokenizer is read from the model's folder"),
    "tokenizer_mode": (("auto",), "the tokenizer is read from tokenizer.json"),
    "skip_tokenizer_init": ((False,), "texts are needed for stop strings; give {'prompt_token_ids': [...]} as prompts"),
    "quantization": ((None,), "use a bfloat16 or float32 checkpoint"),
    "load_format": (("auto", "safetensors"), "checkpoints are safetensors"),
    "kv_cache_dtype": (("auto",), "the KV cache has the dtype of the weights: use dtype"),
    "pipeline_parallel_size": ((1,), "use tensor_parallel_size"),
    "data_parallel_size": ((1,), "start the services: several verifiers stand behind one gateway"),
    "cpu_offload_gb": ((0,), "use tensor_parallel_size"),
    "enable_lora": ((False,), "merge the adapter into the checkpoint"),
    "runner": (("auto", "generate"), "only generation is served"),
    "task": (("auto", "generate"), "only generation is served"),
    "revision": ((None,), "models are local folders: name the folder of that revision"),
    "hf_overrides": ((None, {}), "change config.json in the model's folder"),
    "speculative_model": ((None,), "use speculative_config={'model': ...}"),
    "num_speculative_tokens": ((None,), "use speculative_config={'num_speculative_tokens': ...}"),
    "num_gpu_blocks_override": ((None,), "use kv_cache_mb"),
    "kv_cache_memory_bytes": ((None,), "use kv_cache_mb"),
}


def check_other_arguments(given: Mapping[str, Any]) -> None:
    """Warns of what is ignored. Raises ConfigError that names the argument and what to use instead."""
    for name, value in given.items():
        if name in _IGNORED:
            warnings.warn(f"LLM: {name} is ignored here: {_IGNORED[name]}", UserWarning, stacklevel=3)
        elif name in _HARMLESS:
            harmless, advice = _HARMLESS[name]
            if value not in harmless:
                raise ConfigError(f"LLM: {name}={value!r} is not supported: {advice}", param=name)
        else:
            raise ConfigError(f"LLM: there is no argument {name!r}", param=name)


def dtype_name(dtype: object) -> str:
    """vLLM's names, and torch's own dtypes, as the engine calls them; what it has not is left for it to refuse."""
    name = str(dtype).removeprefix("torch.")
    return {"float": "float32"}.get(name, name)


def checked_config(config_type: type[Any], values: Mapping[str, object]) -> Any:
    """A service's config from Python values, by the service's own checks. Raises ConfigError that names the setting."""
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    try:
        return load_config(config_type, argv, {}, prog="LLM", description="")
    except ConfigError as error:
        flag, _, reason = error.message.partition(":")
        name = flag.removeprefix("--").replace("-", "_")
        raise ConfigError(f"LLM: {name}:{reason}", param=name) from None
