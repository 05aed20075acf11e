"""`outrider serve MODEL`: `outrider up` with the options of `vllm serve` and `llama-server`."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.client.cli.common import DEFAULT_RUN_DIR, RunDir, clear_errors, say
from outrider.client.cli.foreign_options import ForeignCommand, ignored_line, ignored_options, whole_number
from outrider.client.cli.llama_options import LLAMA
from outrider.client.cli.stack import (
    AllowDraftLoading,
    AllowTargetReload,
    GrpcPort,
    Host,
    Learn,
    LearnCheckpoints,
    LearnShare,
    Port,
    RedisUrl,
    run_in_foreground,
)
from outrider.client.cli.vllm_options import VLLM
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.serve_plan import plan_serving, service_args
from outrider.shared.api_keys import key_line
from outrider.shared.checkpoint.hub import with_revision
from outrider.shared.command_line import from_arguments
from outrider.shared.errors import ConfigError
from outrider.shared.vllm_keys import KV_CACHE_DTYPES

_SPEC_HELP = """vLLM's JSON, e.g. '{"model": "DRAFT_FOLDER", "num_speculative_tokens": 5}'; empty: no speculation."""
SpecConfig = Annotated[str, typer.Option("--speculative-config", "-sc", help=_SPEC_HELP)]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="The target: folder, .gguf file or Hub id (ORG/NAME, ORG/NAME@REVISION, ORG/NAME:Q4_K_M)."
    ),
]
ModelOption = Annotated[str, typer.Option("--model", help="The same as MODEL.")]
Revision = Annotated[str, typer.Option(help="Branch, tag or commit of a Hub id; the same as MODEL@REVISION.")]
ServedName = Annotated[str, typer.Option(help="Model name in requests; empty: the folder's name.")]
MaxModelLen = Annotated[
    int, typer.Option(parser=whole_number, help="Longest prompt plus output, e.g. 8192 or 8k; 0 or auto: the model's.")
]
Ranks = Annotated[int, typer.Option("--tensor-parallel-size", "-tp", min=1, help="Processes that share the target.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or half, float32 or float.")]
Quantization = Annotated[str, typer.Option("--quantization", "-q", help="The checkpoint's format; another is refused.")]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs, no recorded forwards.")]
MaxNumSeqs = Annotated[int, typer.Option(parser=whole_number, help="Concurrent sessions; 0: the verifier's default.")]
MaxBatchedTokens = Annotated[
    int, typer.Option(parser=whole_number, help="Rows per forward pass; 0 or auto: the verifier's default.")
]
BlockSize = Annotated[int, typer.Option(min=0, max=256, help="Positions per KV block; 0: the verifier's default.")]
PrefixCaching = Annotated[bool, typer.Option(help="Keep KV blocks of finished requests for equal prefixes.")]
KvCacheMb = Annotated[
    int,
    typer.Option(
        "--kv-cache-mb",
        min=0,
        help="Memory for the KV cache, in MiB per rank; 0: 512 on the CPU, on a GPU what "
        "--gpu-memory-utilization leaves.",
    ),
]
GpuShare = Annotated[
    float, typer.Option(min=0.01, max=1.0, help="Share of a GPU's memory for weights, KV cache and local drafting.")
]
KvCacheType = Annotated[
    str, typer.Option(help="auto: the weights' dtype. fp8 or int8: twice the positions, a scale per token and head.")
]
KvCacheBytes = Annotated[
    int, typer.Option("--kv-cache-memory-bytes", parser=whole_number, help="The same in bytes, e.g. 2G.")
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option("--api-key", envvar="VLLM_API_KEY", help="Key that requests must bring; may be given several times."),
]
ChatTemplate = Annotated[str, typer.Option(help="File of the chat template, or the template itself.")]
_DEFAULTS_HELP = "Folder whose generation_config.json has the sampling defaults; auto: MODEL's; vllm: none."
GenerationConfig = Annotated[str, typer.Option(envvar="OUTRIDER_GENERATION_CONFIG", help=_DEFAULTS_HELP)]
_OVERRIDE_HELP = """Sampling defaults as JSON, e.g. '{"top_k": 20}'."""
GenerationOverride = Annotated[str, typer.Option(envvar="OUTRIDER_OVERRIDE_GENERATION_CONFIG", help=_OVERRIDE_HELP)]
SpecMetrics = Annotated[str, typer.Option(help="none, summary or detailed.")]
NoDocs = Annotated[bool, typer.Option("--disable-fastapi-docs", help="No /docs and no /openapi.json.")]
TracesEndpoint = Annotated[str, typer.Option(help="OpenTelemetry collector, http://host:port.")]
ToolCallParser = Annotated[str, typer.Option(help="How the model writes tool calls; auto: by its chat template.")]
ReasoningParser = Annotated[str, typer.Option(help="How the model marks its reasoning; auto: by its chat template.")]
TokensAsIds = Annotated[
    bool, typer.Option("--return-tokens-as-token-ids", help="Log-probabilities name tokens as token_id:N.")
]
ForceUsage = Annotated[
    bool, typer.Option("--enable-force-include-usage", help="Streams have the usage in every event, unasked.")
]
TokenizerInfo = Annotated[
    bool, typer.Option("--enable-tokenizer-info-endpoint", help="/tokenizer_info, which shows the chat template.")
]
Origins = Annotated[str, typer.Option(help="Origins of pages in browsers that may call: JSON list or commas; *: all.")]
Methods = Annotated[str, typer.Option(help="Methods that those pages may use; empty: all.")]
Headers = Annotated[str, typer.Option(help="Headers that those pages may send; empty: all.")]
Credentials = Annotated[bool, typer.Option("--allow-credentials", help="Those pages may send the browser's cookies.")]

# Values of vLLM's --quantization that name a checkpoint's format; its others quantise weights at load.
_CHECKPOINT_FORMATS = "(awq|gptq|modelopt|mxfp|auto.round|compressed.tensors).*|ascend|gguf|quark"


class ServeCommand(ForeignCommand):
    """Takes the lines of `vllm serve` and `llama-server`."""

    tables = (VLLM, LLAMA)


def serve(
    context: typer.Context,
    model: ModelArgument = "",
    model_option: ModelOption = "",
    revision: Revision = "",
    served_model_name: ServedName = "",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    grpc_port: GrpcPort = None,
    api_key: ApiKeys = None,
    speculative_config: SpecConfig = "",
    max_model_len: MaxModelLen = 0,
    tensor_parallel_size: Ranks = 1,
    dtype: Dtype = "auto",
    quantization: Quantization = "",
    enforce_eager: EnforceEager = False,
    max_num_seqs: MaxNumSeqs = 0,
    max_num_batched_tokens: MaxBatchedTokens = 0,
    block_size: BlockSize = 0,
    enable_prefix_caching: PrefixCaching = True,
    kv_cache_mb: KvCacheMb = 0,
    gpu_memory_utilization: GpuShare = 0.9,
    kv_cache_memory_bytes: KvCacheBytes = 0,
    kv_cache_dtype: KvCacheType = "auto",
    chat_template: ChatTemplate = "",
    generation_config: GenerationConfig = "auto",
    override_generation_config: GenerationOverride = "",
    per_request_spec_decode_metrics: SpecMetrics = "",
    disable_fastapi_docs: NoDocs = False,
    otlp_traces_endpoint: TracesEndpoint = "",
    tool_call_parser: ToolCallParser = "auto",
    reasoning_parser: ReasoningParser = "auto",
    return_tokens_as_token_ids: TokensAsIds = False,
    enable_force_include_usage: ForceUsage = False,
    enable_tokenizer_info_endpoint: TokenizerInfo = False,
    allowed_origins: Origins = "",
    allowed_methods: Methods = "",
    allowed_headers: Headers = "",
    allow_credentials: Credentials = False,
    allow_draft_loading: AllowDraftLoading = False,
    allow_target_reload: AllowTargetReload = False,
    learn: Learn = "off",
    learn_share: LearnShare = 0.1,
    learn_checkpoints: LearnCheckpoints = "",
    redis_url: RedisUrl = "",
    run_dir: RunDir = DEFAULT_RUN_DIR,
) -> None:
    """Serve MODEL until Ctrl-C. Takes the options of `vllm serve` and `llama-server`; what changes no text is ignored.

    Example: outrider serve models/demo-target --port 8000 -tp 1 --speculative-config
    '{"model": "models/demo-draft", "num_speculative_tokens": 5, "method": "draft_model"}'
    """
    with clear_errors():
        name = _one_model(model, model_option)
        target = with_revision(name, revision, "--revision")
        plan = plan_serving(speculative_config, name)
        if line := ignored_line((*ignored_options(context), *plan.ignored)):
            say(line)
        options = {
            **locals(),
            "served_model_name": served_model_name or (name if revision else ""),
            "kv_cache_mb": max(1, kv_cache_memory_bytes // 2**20) if kv_cache_memory_bytes else kv_cache_mb,
            "kv_cache_dtype": _kv_cache_dtype(kv_cache_dtype),
            "api_docs": False if disable_fastapi_docs else None,
            "allowed_origins": _commas(allowed_origins, "--allowed-origins"),
            "allowed_methods": _commas(allowed_methods, "--allowed-methods"),
            "allowed_headers": _commas(allowed_headers, "--allowed-headers"),
        }
        verifier_args, gateway_args = service_args(_given(options))
        settings = from_arguments(
            StackSettings,
            locals(),
            model=target,
            draft_model=plan.draft_model,
            num_drafters=0,
            dtype=_dtype(dtype),
            quantization=_quantization(quantization),
            speculative_config=plan.gateway_config,
            verifier_args=(*verifier_args, *plan.verifier_args),
            drafter_args=plan.drafter_args,
            gateway_args=(*gateway_args, *_key_file(api_key or [], run_dir)),
        )
        run_in_foreground(settings, run_dir)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those at the default of `serve`: there, the service's own default counts."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(serve).parameters.items()}
    return {name: value for name, value in options.items() if value != defaults.get(name)}


def _one_model(argument: str, option: str) -> str:
    if argument and option and argument != option:
        raise ConfigError(f"--model: {option} is given, and MODEL is {argument}; give one of them", param="model")
    if not (argument or option):
        raise ConfigError("MODEL: give the target: a checkpoint folder, a .gguf file or a Hub id", param="model")
    return argument or option


def _dtype(name: str) -> str:
    """The verifier's name of vLLM's. Raises ConfigError."""
    ours = {"float": "float32", "half": "float16"}.get(name, name)
    if ours not in ("auto", "bfloat16", "float16", "float32"):
        raise ConfigError(
            f"--dtype: {name!r} is not one of auto, bfloat16, float16 or half, float32 or float", param="dtype"
        )
    return ours


def _quantization(name: str) -> str:
    """The name itself. Raises ConfigError for those with which vLLM quantises weights at load, such as fp8."""
    if name and not re.fullmatch(_CHECKPOINT_FORMATS, name):
        raise ConfigError(
            f"--quantization: {name!r}: weights are not quantised at load; leave the option out, "
            "or give a quantised checkpoint",
            param="quantization",
        )
    return name


def _kv_cache_dtype(name: str) -> str:
    """The name itself. Raises ConfigError; vLLM has more of them."""
    if name not in KV_CACHE_DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype: {name!r} is not one of {', '.join(KV_CACHE_DTYPES)}", param="kv_cache_dtype"
        )
    return name


def _commas(text: str, option: str) -> str:
    """A list in JSON, as vLLM takes it, with commas instead. Raises ConfigError."""
    if not text.startswith("["):
        return text
    try:
        entries = json.loads(text)
    except ValueError:
        entries = None
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(f"{option}: {text[:80]!r} is not a JSON list of strings", param=option)
    return ",".join(entries)


def _key_file(keys: list[str], run_dir: Path) -> tuple[str, ...]:
    """The gateway's option for a file of the keys' hashes that only this user may read; none without keys."""
    if not keys:
        return ()
    if not all(key.strip() for key in keys):
        raise ConfigError("--api-key: a key is empty; give one, or leave the option out", param="api_key")
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "api-keys"
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text("".join(f"{key_line(f'key-{number}', key)}\n" for number, key in enumerate(keys, start=1)))
    return ("--api-keys-file", str(path))
