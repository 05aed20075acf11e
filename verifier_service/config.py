"""Settings of the verifier service."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.drafting.settings import LookupSettings
from outrider.engine.settings import ModelSettings
from outrider.shared.config import setting
from outrider.shared.settings import ServiceSettings
from outrider.shared.vllm_keys import KV_CACHE_DTYPES


@dataclass(frozen=True)
class VerifierConfig(LookupSettings, ModelSettings, ServiceSettings):
    model: str = setting("", "The target: checkpoint folder, .gguf file or Hub id (ORG/NAME, ORG/NAME@REVISION).")
    served_model_name: str = setting("", "Name that requests use; the folder's name if empty.")
    port: int = setting(7001, "gRPC port; 0 picks a free one.", minimum=0, maximum=65535)
    tensor_parallel_size: int = setting(1, "Processes that share the target; on cuda one GPU each.", minimum=1)
    kv_cache_mb: int = setting(
        0,
        "KV cache in MiB per tensor-parallel rank; 0: 512 on the CPU, on a GPU what --gpu-memory-utilization leaves.",
        minimum=0,
    )
    gpu_memory_utilization: float = setting(
        0.9, "Share of a GPU's memory for weights, KV cache and local drafting.", minimum=0.01, maximum=1.0
    )
    kv_cache_dtype: str = setting(
        "auto",
        "KV cache: auto is the dtype of the weights; fp8 (e4m3) and int8 are 8 bits with a scale per token and head, "
        "twice the positions of bfloat16.",
        choices=tuple(KV_CACHE_DTYPES),
    )
    enable_prefix_caching: bool = setting(True, "Keep KV blocks of finished sessions for equal prefixes.")
    max_model_len: int = setting(0, "Longest prompt plus output; 0: the model's own.", minimum=0)
    max_num_seqs: int = setting(64, "Concurrent sessions; more are refused with RESOURCE_EXHAUSTED.", minimum=1)
    max_num_batched_tokens: int = setting(512, "Rows per forward pass.", minimum=8)
    slo_itl_ms: float = setting(
        0.0,
        "Objective for the time between two pieces of a stream. While sessions decode, prompt chunks shrink, to four "
        "rows at least, so that about 95 % of the pieces are in time. 0: --prefill-chunk-size alone.",
        minimum=0,
    )
    rejection_sample_method: str = setting(
        "block", "Acceptance rule for chains in rejection mode.", choices=("standard", "block")
    )
    local_draft_model: tuple[str, ...] = setting(
        (),
        "Folders of draft models and trained heads for drafting in the verifier, comma-separated; several of one kind: "
        "NAME=FOLDER each. Their methods need no drafter.",
    )
    local_methods: tuple[str, ...] = setting(
        (), "Methods for drafting in the verifier; empty: all with --local-draft-model, none without it."
    )
    local_enforce_eager: bool = setting(False, "As --enforce-eager, for drafting in the verifier.")
    local_kv_cache_mb: int = setting(128, "KV cache for drafting in the verifier, in MiB.", minimum=1)
    allow_draft_loading: bool = setting(
        False,
        "Whoever can call the verifier may have it load other weights for its own drafting (`outrider load-draft`); "
        "beyond loopback with --tls-ca-file only.",
    )
    allow_target_reload: bool = setting(
        False,
        "Whoever can call the verifier may have it load other weights of the target (`outrider reload`); beyond "
        "loopback with --tls-ca-file only.",
    )
    learn: str = setting(
        "off",
        "shared: the head that drafts in the verifier is trained further on what it serves, in a process beside. "
        "Sessions with a cache salt are left out. per-salt: each cache salt gets a head of its own, trained on its "
        "sessions alone; those without a salt are left out.",
        choices=("off", "shared", "per-salt"),
    )
    learn_share: float = setting(0.1, "Share of one core that learning may take.", minimum=0.01, maximum=1.0)
    learn_cycle_tokens: int = setting(
        20_000,
        "Output tokens of new text after which the head is trained further and judged; less text made heads worse.",
        minimum=1000,
    )
    learn_buffer_mb: int = setting(
        512, "Memory for served text to learn from, in MiB; of all salts together.", minimum=16
    )
    record_hidden_states: str = setting(
        "",
        "Folder into which tokens and hidden states of ended sessions are written, to train a head without running the "
        "target again (`outrider train train --hidden-states`); sessions with a cache salt are left out; empty: none.",
    )
    record_hidden_states_gb: float = setting(16.0, "Most that --record-hidden-states writes, in GiB.", minimum=0.01)
    learn_checkpoints: str = setting(
        "", "Folder for learned heads, which holds no text; empty: they go with the process."
    )
