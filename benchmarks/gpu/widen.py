"""Pads a Llama and its EAGLE-3 head with zeros to a larger width, with the same function: real chat at a large
model's price, where no large model's weights are at hand.

    python -m benchmarks.gpu.widen FOLDER HEAD OUT --hidden-size 4096 --num-heads 64 --num-kv-heads 16
    python -m benchmarks.real_chat OUT/target --head OUT/head --lengths 1,3,5

The residual stream's new entries stay zero, since what writes to it has rows of zeros; RMSNorm's mean over more entries
is made up for by its weights and epsilon (models/make/expand.py has the argument, and pads depth too). The query heads
of a KV head stay with it, so their number may grow. All other new entries are random: kernels run at full price.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file

FILLER_STD = 0.02
_COPIED = {".json", ".jinja", ".txt", ".model"}
# These write to the residual stream or read its embedding: their new entries must be zero.
_ZERO_FILLED = ("o_proj", "down_proj", "fc", "embed_tokens", "lm_head")


@dataclass(frozen=True)
class Widths:
    """The sizes of a decoder's layers."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    head_dim: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Widths:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return cls(config["hidden_size"], heads, config["num_key_value_heads"], config["intermediate_size"], head_dim)


def widened(name: str, weight: torch.Tensor, old: Widths, new: Widths, device: torch.device) -> torch.Tensor:
    """Returns the named weight of a Llama or an EAGLE-3 head at the new widths, of its own dtype, on the CPU."""
    part = name.split(".")[-2]
    if "norm" in part:
        scale = math.sqrt(old.hidden_size / new.hidden_size)
        padded = torch.full((new.hidden_size,), scale)
        padded[: len(weight)] = weight.float() * scale
        return padded.to(weight.dtype)
    group, new_group = old.num_heads // old.num_kv_heads, new.num_heads // new.num_kv_heads
    queries = torch.arange(old.num_kv_heads * new_group * old.head_dim).view(old.num_kv_heads, new_group, -1)
    kept_queries = queries[:, :group].flatten()
    # An input of several streams side by side, as an EAGLE-3 head's, is padded in each.
    streams = [torch.arange(old.hidden_size) + at * new.hidden_size for at in range(weight.shape[1] // old.hidden_size)]
    rows, kept_rows = {
        "q_proj": (new.num_heads * new.head_dim, kept_queries),
        "k_proj": (new.num_kv_heads * new.head_dim, torch.arange(len(weight))),
        "v_proj": (new.num_kv_heads * new.head_dim, torch.arange(len(weight))),
        "gate_proj": (new.intermediate_size, torch.arange(len(weight))),
        "up_proj": (new.intermediate_size, torch.arange(len(weight))),
        **dict.fromkeys(("o_proj", "down_proj", "fc"), (new.hidden_size, torch.arange(len(weight)))),
    }.get(part, (len(weight), torch.arange(len(weight))))
    columns, kept_columns = {
        "o_proj": (new.num_heads * new.head_dim, kept_queries),
        "down_proj": (new.intermediate_size, torch.arange(weight.shape[1])),
    }.get(part, (len(streams) * new.hidden_size, torch.cat(streams) if streams else torch.arange(0)))
    padded = torch.zeros(rows, columns, dtype=weight.dtype, device=device)
    if part not in _ZERO_FILLED:
        padded.normal_(std=FILLER_STD)
    padded[kept_rows[:, None].to(device), kept_columns.to(device)] = weight.to(device)
    return padded.cpu()


def widen_folder(source: Path, target: Path, new: Widths, device: torch.device) -> None:
    """Writes the checkpoint of a Llama or an EAGLE-3 head at the new widths."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix in _COPIED and "index" not in file.name:
            shutil.copy(file, target)
    config = json.loads((source / "config.json").read_text())
    decoder = config.get("transformer_layer_config", config)
    old = Widths.of(decoder)
    decoder.update(
        hidden_size=new.hidden_size,
        num_attention_heads=new.num_heads,
        num_key_value_heads=new.num_kv_heads,
        intermediate_size=new.intermediate_size,
        head_dim=new.head_dim,
        rms_norm_eps=decoder["rms_norm_eps"] * old.hidden_size / new.hidden_size,
    )
    if "target_hidden_size" in config:
        config["target_hidden_size"] = new.hidden_size
    (target / "config.json").write_text(json.dumps(config, indent=2))
    weights = {
        name: weight for file in sorted(source.glob("*.safetensors")) for name, weight in load_file(file).items()
    }
    padded = {
        name: weight if name in ("d2t", "t2d") else widened(name, weight, old, new, device)
        for name, weight in weights.items()
    }
    save_file(padded, target / "model.safetensors", {"format": "pt"})


def main(
    model: Annotated[Path, typer.Argument(help="A Llama's folder.")],
    head: Annotated[Path, typer.Argument(help="Its EAGLE-3 head's folder.")],
    out: Annotated[Path, typer.Argument(help="Folder for `target` and `head`.")],
    hidden_size: Annotated[int, typer.Option()] = 4096,
    num_heads: Annotated[int, typer.Option()] = 64,
    num_kv_heads: Annotated[int, typer.Option()] = 16,
    intermediate_size: Annotated[int, typer.Option()] = 14336,
) -> None:
    """The defaults have the widths of a Llama of 8 billion parameters, in heads of 64."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    old = Widths.of(json.loads((model / "config.json").read_text()))
    new = Widths(hidden_size, num_heads, num_kv_heads, intermediate_size, old.head_dim)
    widen_folder(model, out / "target", new, device)
    widen_folder(head, out / "head", new, device)


if __name__ == "__main__":
    typer.run(main)
