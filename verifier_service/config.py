"""Settings of the verifier service."""

from __future__ import annotations

from dataclasses import dataclass

from drafter_service.config import LookupSettings
from shared.config import setting
from shared.tracing import OTLP_TRACES_ENDPOINT_HELP


@dataclass(frozen=True)
class VerifierConfig(LookupSettings):
    model: str = setting("", "Folder of the target's HF checkpoint (safetensors).")
    served_model_name: str = setting("", "Name that requests use; the folder's name if empty.")
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(7001, "gRPC port; 0 takes a free one.", minimum=0, maximum=65535)
    metrics_port: int = setting(0, "Port of /metrics; 0 serves none.", minimum=0, maximum=65535)
    tls_cert_file: str = setting("", "Certificate of the gRPC port (PEM); empty: no TLS.")
    tls_key_file: str = setting("", "Its private key.")
    tls_ca_file: str = setting("", "Gateways must present a certificate that this authority has signed.")
    reflection: bool | None = setting(None, "gRPC reflection; auto: on loopback only.")
    dtype: str = setting("auto", "Weights and KV cache.", choices=("auto", "bfloat16", "float32"))
    device: str = setting("cpu", "Where the target runs.", choices=("cpu", "cuda"))
    attention_backend: str = setting(
        "auto",
        "Attention kernel; auto takes the fastest for the device.",
        choices=("auto", "cpu", "reference", "triton"),
    )
    enforce_eager: bool = setting(False, "No CUDA graphs, and no recorded forwards on the CPU.")
    num_threads: int = setting(0, "Threads of the forward pass; 0 takes every core.", minimum=0)
    tensor_parallel_size: int = setting(1, "Processes that share the target; on cuda one GPU each.", minimum=1)
    block_size: int = setting(16, "Positions per KV block.", minimum=1, maximum=256)
    kv_cache_mb: int = setting(512, "Memory for the KV cache, in MiB per tensor-parallel rank.", minimum=1)
    enable_prefix_caching: bool = setting(True, "Keep the KV blocks of finished sessions for equal prefixes.")
    max_model_len: int = setting(0, "Longest prompt plus output; 0 takes the model's own.", minimum=0)
    max_num_seqs: int = setting(64, "Sessions at once; more are refused with RESOURCE_EXHAUSTED.", minimum=1)
    max_num_batched_tokens: int = setting(512, "Rows per forward pass.", minimum=8)
    prefill_chunk_size: int = setting(256, "Most prompt rows of one session per forward pass.", minimum=1)
    slo_itl_ms: float = setting(
        0.0,
        "The time between two pieces of a stream that should be kept to: prompts are read in smaller pieces while "
        "somebody decodes, by how many come late, but never in less than four rows. 0: --prefill-chunk-size alone.",
        minimum=0,
    )
    rejection_sample_method: str = setting(
        "block", "Acceptance rule for chains in rejection mode.", choices=("standard", "block")
    )
    local_draft_model: tuple[str, ...] = setting(
        (),
        "Folders of draft models and trained heads that this verifier drafts with by itself, comma-separated: for what "
        "it drafts no drafter is asked.",
    )
    local_methods: tuple[str, ...] = setting(
        (), "Methods that it drafts with by itself; empty: with --local-draft-model all there are, without it none."
    )
    local_enforce_eager: bool = setting(False, "As --enforce-eager, for what it drafts with.")
    local_kv_cache_mb: int = setting(128, "Memory for the KV cache of what it drafts with, in MiB.", minimum=1)
    drain_s: float = setting(30.0, "Seconds that running sessions may go on after SIGTERM.", minimum=0)
    otlp_traces_endpoint: str = setting("", OTLP_TRACES_ENDPOINT_HELP)
    log_level: str = setting("info", "Log level.", choices=("debug", "info", "warning", "error"))
