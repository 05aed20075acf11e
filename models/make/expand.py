"""Makes a small Llama wider and deeper without changing its function: a large target's cost for benchmarks.

With h the old and H the new width: the residual stream is padded with zeros that stay zero, because the new rows of
`o_proj` and `down_proj` are zero. RMSNorm takes the mean over H entries instead of h, so the padded stream comes out
larger by sqrt(H/h); norm weights are multiplied by sqrt(h/H) and `rms_norm_eps` by h/H, which cancels it exactly.
Columns of `o_proj` for new heads and of `down_proj` for new intermediate rows are zero, as are both matrices of new
layers. All other new entries are small random numbers, so dense kernels run at full cost and no denormals arise.

Not compression or training: the large model has the small one's outputs at the large one's cost.
Run: `python -m models.make.expand --help`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from models.make.family import export_model
from outrider.training.errors import ExpansionError

MAX_LOGIT_DIFFERENCE = 1e-3
FILLER_STD = 0.02
# These write to values of the old function, so their new entries must be zero.
ZERO_FILLED = ("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Shape:
    """The requested size. num_kv_heads None: the source's number of query heads per KV head."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int | None = None


def expanded_config(source: LlamaConfig, shape: Shape) -> LlamaConfig:
    """Returns the expanded model's config. Raises ExpansionError with the field that is too small for the source."""
    heads_per_kv = source.num_attention_heads // source.num_key_value_heads
    num_kv_heads = shape.num_kv_heads or shape.num_heads // heads_per_kv
    minima = {
        "hidden_size": (shape.hidden_size, source.hidden_size),
        "num_layers": (shape.num_layers, source.num_hidden_layers),
        "intermediate_size": (shape.intermediate_size, source.intermediate_size),
        "num_heads": (shape.num_heads, source.num_attention_heads),
        "num_kv_heads": (num_kv_heads, source.num_key_value_heads),
    }
    for name, (wished, least) in minima.items():
        if wished < least:
            raise ExpansionError(f"{name}={wished} is smaller than the source's {least}")
    # A query head finds its KV head by division: another ratio would give old heads new KV heads.
    if shape.num_heads != num_kv_heads * heads_per_kv:
        raise ExpansionError(
            f"num_heads={shape.num_heads} over num_kv_heads={num_kv_heads}: must be {heads_per_kv} each"
        )
    if shape.hidden_size % shape.num_heads:  # required by transformers, although head_dim is given
        raise ExpansionError(f"hidden_size={shape.hidden_size} is not a multiple of num_heads={shape.num_heads}")
    if source.attention_bias or source.mlp_bias:
        raise ExpansionError("attention_bias and mlp_bias are not supported")
    values = source.to_dict() | {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": source.head_dim,
        "rms_norm_eps": source.rms_norm_eps * source.hidden_size / shape.hidden_size,
        "dtype": "float32",
    }
    return LlamaConfig(**values)


@torch.no_grad()
def expand(source: LlamaForCausalLM, shape: Shape, seed: int = 0) -> LlamaForCausalLM:
    """Builds an fp32 model of `shape` with the same logits as `source` for every input.

    Raises ExpansionError when the shape cannot hold the source.
    """
    config = expanded_config(source.config, shape)
    target = LlamaForCausalLM._from_config(config, dtype=torch.float32)
    old = source.state_dict()
    norm_scale = math.sqrt(source.config.hidden_size / shape.hidden_size)
    generator = torch.Generator().manual_seed(seed)
    for name, new in target.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        old_tensor = old.get(name)
        if name.endswith("norm.weight"):
            new.fill_(norm_scale)
            if old_tensor is not None:
                new[: len(old_tensor)] = old_tensor.float() * norm_scale
            continue
        if name.endswith(ZERO_FILLED):
            new.zero_()
        else:
            new.copy_(torch.randn(new.shape, generator=generator) * FILLER_STD)
        if old_tensor is not None:
            rows, columns = old_tensor.shape
            new[:rows, :columns] = old_tensor.float()
    return target.eval()


@torch.no_grad()
def max_logit_difference(source: LlamaForCausalLM, other: LlamaForCausalLM, seed: int = 0) -> float:
    """Returns the largest |difference| of the two models' fp32 logits over 4 random sequences of 128 tokens."""
    generator = torch.Generator().manual_seed(seed)
    length = min(128, source.config.max_position_embeddings)
    input_ids = torch.randint(source.config.vocab_size, (4, length), generator=generator)
    difference = source(input_ids=input_ids).logits.float() - other(input_ids=input_ids).logits.float()
    return float(difference.abs().max())


def main(
    source_dir: Annotated[Path, typer.Argument(help="HF folder of a small Llama")],
    out: Annotated[Path, typer.Argument(help="folder for the expanded model")],
    hidden_size: Annotated[int, typer.Option()] = 1024,
    num_layers: Annotated[int, typer.Option()] = 12,
    intermediate_size: Annotated[int, typer.Option()] = 2816,
    num_heads: Annotated[int, typer.Option()] = 16,
    seed: Annotated[int, typer.Option(help="seed of the random entries")] = 0,
) -> None:
    """Expand a model and write it in bf16, after checking in fp32 that it computes the same function.

    bf16 rounds the rescaled norm weights unless H/h is a power of 4 (320 -> 1280): the second figure printed is the
    effect on the logits.

    Examples:

      python -m models.make.expand models/demo-target .run/target-158m

      python -m models.make.expand models/demo-target .run/target-237m --hidden-size 1280 --num-heads 20
    --intermediate-size 3328
    """
    console = Console()
    source = LlamaForCausalLM.from_pretrained(source_dir, dtype=torch.float32).eval()
    expanded = expand(source, Shape(hidden_size, num_layers, intermediate_size, num_heads), seed)
    difference = max_logit_difference(source, expanded)
    if not difference <= MAX_LOGIT_DIFFERENCE:
        raise ExpansionError(f"logits differ by {difference:.2e}, more than {MAX_LOGIT_DIFFERENCE:.0e}: not written")
    export_model(expanded, out, source_dir)
    written = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    millions = sum(parameter.numel() for parameter in expanded.parameters()) / 1e6
    console.print(f"{out}: {millions:.1f} M parameters; max |logit difference| {difference:.1e} in fp32")
    console.print(f"after rounding the weights to bf16: {max_logit_difference(source, written):.1e}")


if __name__ == "__main__":
    typer.run(main)
