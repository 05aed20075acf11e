"""Expands the heads of a small target to its expanded twin (models.make.expand): same drafts, the twin's cost.

A head reads the same values from the twin as from the small target, followed by zeros: the residual stream of a layer
and the final norm's output are unchanged. So columns for new entries are zero, rows that write into a stream are zero,
norms are rescaled as in `expand`, and a decoder gets the twin's number of heads and an MLP that grows with the width.
Not here: heads in other layouts than training exports. Run: `python -m models.make.expand_heads --help`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from safetensors.torch import load_file, save_file

from outrider.drafting.checkpoints.mlp_speculator import PREFIX
from outrider.drafting.checkpoints.recognise import recognise
from outrider.training.errors import ExpansionError

_FILLER_STD = 0.02


@dataclass(frozen=True)
class Widths:
    """Old and new hidden sizes. num_heads: the new number of attention heads of an EAGLE decoder."""

    old: int
    new: int
    num_heads: int

    @property
    def norm_scale(self) -> float:
        """Returns the norm's scale: an RMS norm scales up a zero-padded stream by its inverse."""
        return math.sqrt(self.old / self.new)

    def intermediate_size(self, old: int) -> int:
        return -(-old * self.new // self.old // 64) * 64


def expand_head(head_dir: Path, target_dir: Path, expanded_dir: Path, out: Path) -> str:
    """Writes the expanded head to `out`; returns its method.

    Raises ExpansionError when the second target is not an expansion of the first, or the method has no head;
    CheckpointRefused.
    """
    method = recognise(head_dir)
    if method not in _EXPANSIONS:
        raise ExpansionError(
            f"{head_dir} is a {method}: it reads only tokens and works unchanged with the expanded target"
        )
    small, large = (json.loads((path / "config.json").read_text("utf-8")) for path in (target_dir, expanded_dir))
    widths = Widths(small["hidden_size"], large["hidden_size"], large["num_attention_heads"])
    if widths.new < widths.old or small["vocab_size"] != large["vocab_size"]:
        raise ExpansionError(f"{expanded_dir} is not an expansion of {target_dir}")
    config = json.loads((head_dir / "config.json").read_text("utf-8"))
    tensors = load_file(head_dir / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    config, tensors = _EXPANSIONS[method](config, tensors, widths, generator)
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(out / "model.safetensors"))
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return method


Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def _medusa(config: Config, tensors: Tensors, widths: Widths, _generator: torch.Generator) -> tuple[Config, Tensors]:
    """Pads the blocks: zeros stay zero in a residual block, as silu(0) = 0."""
    expanded = {
        name: _padded(tensor, widths.new if name.startswith("blocks.") else tensor.shape[0], widths)
        for name, tensor in tensors.items()
    }
    return config | {"hidden_size": widths.new}, expanded


def _mlp_speculator(
    config: Config, tensors: Tensors, widths: Widths, _generator: torch.Generator
) -> tuple[Config, Tensors]:
    """Pads the first projection, which alone reads the target; the state's width is unchanged."""
    inner_dim = config["inner_dim"] or config["emb_dim"]
    first = f"{PREFIX}proj.0.weight"
    scale = widths.norm_scale if config["scale_input"] else 1.0
    projection = _padded((tensors[first].float() * scale).to(tensors[first].dtype), inner_dim, widths)
    return config | {"emb_dim": widths.new, "inner_dim": inner_dim}, tensors | {first: projection}


def _eagle(config: Config, tensors: Tensors, widths: Widths, generator: torch.Generator) -> tuple[Config, Tensors]:
    expanded = _expand_decoder(tensors, config, widths, generator)
    return config | _decoder_sizes(config, widths), expanded


def _eagle3(config: Config, tensors: Tensors, widths: Widths, generator: torch.Generator) -> tuple[Config, Tensors]:
    decoder = config["transformer_layer_config"]
    expanded = _expand_decoder(tensors, decoder, widths, generator)
    sizes = {"transformer_layer_config": decoder | _decoder_sizes(decoder, widths), "target_hidden_size": widths.new}
    return config | sizes, expanded


_EXPANSIONS: dict[str, Callable[[Config, Tensors, Widths, torch.Generator], tuple[Config, Tensors]]] = {
    "medusa": _medusa,
    "mlp_speculator": _mlp_speculator,
    "eagle": _eagle,
    "eagle3": _eagle3,
}


def _decoder_sizes(config: Config, widths: Widths) -> Config:
    return {
        "hidden_size": widths.new,
        "intermediate_size": widths.intermediate_size(config["intermediate_size"]),
        "num_attention_heads": widths.num_heads,
        "num_key_value_heads": widths.num_heads // _group(config),
        "rms_norm_eps": config["rms_norm_eps"] * widths.old / widths.new,
    }


def _group(config: Config) -> int:
    """Returns the query heads per KV head: unchanged, so that old heads find their KV heads."""
    return int(config["num_attention_heads"]) // int(config["num_key_value_heads"])


def _expand_decoder(tensors: Tensors, config: Config, widths: Widths, generator: torch.Generator) -> Tensors:
    attention_width = widths.num_heads * config["head_dim"]
    kv_width = attention_width // _group(config)
    intermediate_size = widths.intermediate_size(config["intermediate_size"])
    expanded: Tensors = {}
    for name, tensor in tensors.items():
        kind = name.rpartition(".")[0].rpartition(".")[2]
        if name in ("d2t", "t2d"):
            expanded[name] = tensor
        elif kind.endswith("norm"):
            scaled = torch.full((widths.new,), widths.norm_scale)
            scaled[: widths.old] = tensor.float() * widths.norm_scale
            expanded[name] = scaled.to(tensor.dtype)
        elif kind in ("q_proj", "k_proj", "v_proj"):
            width = attention_width if kind == "q_proj" else kv_width
            expanded[name] = _padded(tensor, width, widths, generator)
        elif kind in ("gate_proj", "up_proj"):
            expanded[name] = _padded(tensor, intermediate_size, widths, generator)
        elif kind in ("o_proj", "down_proj"):
            columns = attention_width if kind == "o_proj" else intermediate_size
            filled = tensor.new_zeros((widths.new, columns))
            filled[: tensor.shape[0], : tensor.shape[1]] = tensor
            expanded[name] = filled
        elif kind == "fc":
            expanded[name] = _padded(tensor, widths.new, widths)
        elif kind in ("lm_head", "embed_tokens"):
            expanded[name] = _padded(tensor, tensor.shape[0], widths)
        else:
            raise ExpansionError(f"tensor {name}: training exports no such tensor")
    return expanded


def _padded(
    tensor: torch.Tensor, num_rows: int, widths: Widths, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Follows each run of `old` columns with zeros up to `new`; then adds zero rows, or small random ones.

    Random rows are for values that are multiplied by zeros later, to keep the arithmetic's cost real.
    """
    if tensor.ndim == 1:
        return torch.cat([tensor, tensor.new_zeros(num_rows - len(tensor))])
    num_runs = tensor.shape[1] // widths.old
    filled = tensor.new_zeros((num_rows, num_runs, widths.new))
    if generator is not None:
        filled.copy_(torch.randn(filled.shape, generator=generator) * _FILLER_STD)
        filled[: tensor.shape[0]] = 0.0
    filled[: tensor.shape[0], :, : widths.old] = tensor.view(tensor.shape[0], num_runs, widths.old)
    return filled.view(num_rows, -1)


def main(
    head_dir: Annotated[Path, typer.Argument(help="a head exported by training")],
    expanded_dir: Annotated[Path, typer.Argument(help="its target, expanded by models.make.expand")],
    out: Annotated[Path, typer.Argument(help="folder for the expanded head")],
    target_dir: Annotated[Path, typer.Option(help="the target before expansion")] = Path("models/demo-target"),
) -> None:
    """Expand a draft head to its target's expanded twin.

    Example: python -m models.make.expand_heads models/demo-eagle3 .run/target-158m .run/eagle3-158m
    """
    method = expand_head(head_dir, target_dir, expanded_dir, out)
    Console().print(f"{out}: {method}, {(out / 'model.safetensors').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    typer.run(main)
