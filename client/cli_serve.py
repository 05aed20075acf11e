"""`outrider serve MODEL`: `outrider up` as `vllm serve` spells it; options that are not known are refused by name."""

from __future__ import annotations

from typing import Annotated

import typer

from client.cli_common import DEFAULT_RUN_DIR, RunDir, clear_errors, say
from client.cli_stack import Dtype, GrpcPort, Host, Port, RedisUrl, check_folders, run_in_foreground
from client.serve_plan import plan_serving
from client.stack_commands import StackSettings

_SPEC_HELP = """vLLM's JSON, e.g. '{"model": "DRAFT_FOLDER", "num_speculative_tokens": 5}'; empty: no speculation."""
SpecConfig = Annotated[str, typer.Option("--speculative-config", "--speculative_config", "-sc", help=_SPEC_HELP)]
MaxModelLen = Annotated[
    int, typer.Option("--max-model-len", "--max_model_len", min=0, help="Longest prompt plus output; 0: the model's.")
]
Ranks = Annotated[
    int,
    typer.Option("--tensor-parallel-size", "--tensor_parallel_size", "-tp", min=1, help="Processes of the target."),
]
Seed = Annotated[int, typer.Option(help="Ignored: a request's own seed decides.")]
GpuShare = Annotated[
    float | None,
    typer.Option("--gpu-memory-utilization", "--gpu_memory_utilization", help="Ignored: see --kv-cache-mb."),
]
KvCacheMb = Annotated[int, typer.Option("--kv-cache-mb", min=1, help="Memory for the KV cache, in MiB per rank.")]


def serve(
    model: Annotated[str, typer.Argument(help="Folder of the target's HF checkpoint.")],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    grpc_port: GrpcPort = 8001,
    speculative_config: SpecConfig = "",
    max_model_len: MaxModelLen = 0,
    tensor_parallel_size: Ranks = 1,
    dtype: Dtype = "auto",
    kv_cache_mb: KvCacheMb = 512,
    seed: Seed = 0,
    gpu_memory_utilization: GpuShare = None,
    redis_url: RedisUrl = "",
    run_dir: RunDir = DEFAULT_RUN_DIR,
) -> None:
    """Serve MODEL, with vLLM's options, until Ctrl-C.

    Example: outrider serve models/demo-target --port 8000 -tp 1 --speculative-config
    '{"model": "models/demo-draft", "num_speculative_tokens": 5, "method": "draft_model"}'
    """
    with clear_errors():
        plan = plan_serving(speculative_config)
        check_folders(model, plan.draft_model)
        ignored = [*plan.ignored, *(["--seed: a request's own seed decides"] if seed else [])]
        if gpu_memory_utilization is not None:
            ignored.append("--gpu-memory-utilization: the KV cache's size is --kv-cache-mb")
        for line in ignored:
            say(f"ignored, {line}")
        verifier_args = ("--tensor-parallel-size", str(tensor_parallel_size), "--kv-cache-mb", str(kv_cache_mb))
        settings = StackSettings(
            model=model,
            draft_model=plan.draft_model,
            host=host,
            port=port,
            grpc_port=grpc_port,
            redis_url=redis_url,
            num_drafters=0,
            dtype=dtype,
            speculative_config=plan.gateway_config,
            verifier_args=(*verifier_args, "--max-model-len", str(max_model_len), *plan.verifier_args),
            drafter_args=plan.drafter_args,
        )
        run_in_foreground(settings, run_dir)
