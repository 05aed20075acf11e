"""Settings of every process that runs a model: device, precision, and how rows are cut into blocks and chunks."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.shared.config import setting


@dataclass(frozen=True)
class ModelSettings:
    dtype: str = setting(
        "auto",
        "Weights and KV cache; float16 weights are computed in float32.",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    device: str = setting(
        "auto", "Where models run; auto: on the GPU where torch sees one.", choices=("auto", "cpu", "cuda")
    )
    attention_backend: str = setting(
        "auto",
        "Attention kernel; auto takes the fastest for the device.",
        choices=("auto", "cpu", "reference", "triton"),
    )
    packed_arithmetic: str = setting(
        "auto",
        "Products of quantised weights: int8 rounds each group of activations to 8 bits and sums integers "
        "(faster; needs AVX2 on a CPU), bf16 does neither; auto takes int8 where its error is measured to be small.",
        choices=("auto", "bf16", "int8"),
    )
    enforce_eager: bool = setting(False, "No CUDA graphs, and no recorded forwards on the CPU.")
    num_threads: int = setting(0, "Threads of the forward pass; 0 takes every core.", minimum=0)
    block_size: int = setting(16, "Positions per KV block.", minimum=1, maximum=256)
    prefill_chunk_size: int = setting(256, "Most prompt rows of one session per forward pass.", minimum=1)
