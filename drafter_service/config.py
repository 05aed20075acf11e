"""Settings of the drafter service."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config import setting
from shared.tracing import OTLP_TRACES_ENDPOINT_HELP


@dataclass(frozen=True)
class LookupSettings:
    """Of the methods that need no checkpoint, wherever they draft."""

    prompt_lookup_min: int = setting(1, "Shortest n-gram that is looked up.", minimum=1, maximum=64)
    prompt_lookup_max: int = setting(5, "Longest n-gram that is looked up.", minimum=1, maximum=64)
    suffix_decoding_max_tree_depth: int = setting(
        24, "Most tokens of a match and of the draft after it together, for method suffix.", minimum=2, maximum=256
    )
    suffix_decoding_max_cached_requests: int = setting(
        10_000, "Outputs of ended sessions to look in; 0: only in the session's own text.", minimum=0
    )
    suffix_decoding_max_cached_nodes: int = setting(
        1_000_000, "Most nodes of their trees: 130 bytes each, 1.2 for each token.", minimum=6
    )
    suffix_decoding_max_spec_factor: float = setting(
        1.0, "Most draft tokens for each matching token.", minimum=0, maximum=256
    )
    suffix_decoding_min_token_prob: float = setting(
        0.1, "Least probability, by the counts, of a draft token together with those before it.", minimum=0, maximum=1
    )


@dataclass(frozen=True)
class DrafterConfig(LookupSettings):
    draft_model: tuple[str, ...] = setting(
        (), "Folders of draft models and trained heads, comma-separated; the method of each is recognised."
    )
    target_model: str = setting(
        "", "Folder of the target's checkpoint: heads use its embedding and output head, draft models its tokenizer."
    )
    methods: tuple[str, ...] = setting((), "Draft methods to serve, comma-separated; empty: all there are.")
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(7002, "gRPC port; 0 takes a free one.", minimum=0, maximum=65535)
    metrics_port: int = setting(0, "Port of /metrics; 0 serves none.", minimum=0, maximum=65535)
    tls_cert_file: str = setting("", "Certificate of the gRPC port (PEM); empty: no TLS.")
    tls_key_file: str = setting("", "Its private key.")
    tls_ca_file: str = setting("", "Gateways must present a certificate that this authority has signed.")
    reflection: bool | None = setting(None, "gRPC reflection; auto: on loopback only.")
    dtype: str = setting("auto", "Weights and KV cache.", choices=("auto", "bfloat16", "float32"))
    device: str = setting("cpu", "Where draft models run.", choices=("cpu", "cuda"))
    attention_backend: str = setting(
        "auto",
        "Attention kernel; auto takes the fastest for the device.",
        choices=("auto", "cpu", "reference", "triton"),
    )
    enforce_eager: bool = setting(False, "No CUDA graphs, and no recorded forwards on the CPU.")
    num_threads: int = setting(0, "Threads of the forward pass; 0 takes every core.", minimum=0)
    block_size: int = setting(16, "Positions per KV block.", minimum=1, maximum=256)
    kv_cache_mb: int = setting(128, "Memory for the KV cache, in MiB.", minimum=1)
    prefill_chunk_size: int = setting(256, "Most prompt rows of one session per forward pass.", minimum=1)
    max_num_seqs: int = setting(128, "Sessions at once; more are refused with RESOURCE_EXHAUSTED.", minimum=1)
    drain_s: float = setting(10.0, "Seconds that running sessions may go on after SIGTERM.", minimum=0)
    otlp_traces_endpoint: str = setting("", OTLP_TRACES_ENDPOINT_HELP)
    log_level: str = setting("info", "Log level.", choices=("debug", "info", "warning", "error"))
