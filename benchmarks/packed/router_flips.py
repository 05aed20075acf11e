"""Measures how often packing changes a router's choice: `python -m benchmarks.packed.router_flips FOLDER TEXT...`.

FOLDER gets a trained mixture if it has none: the demo target, each of whose MLPs becomes four experts of which a router
takes two (sparse upcycling, Komatsuzaki et al. 2023, arXiv:2212.05055), trained on the first nine tenths of the texts.
On the last tenth, every side's choices are compared with those of the bfloat16 weights. Rows go to
benchmarks/results/router_flips.jsonl.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig

from benchmarks.packed.__main__ import BLOCK_SIZE
from benchmarks.records import save_rows
from benchmarks.screen import console, table
from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.model.load import load_model
from outrider.engine.run.runner import ModelRunner
from outrider.gateway.request.tokenizer import Tokenizer

_DENSE = Path("models/demo-target")
_NUM_EXPERTS, _NUM_CHOSEN = 4, 2
_NOISE = 0.1  # share of a weight's spread; by how much experts differ at first
_ROWS, _LENGTH = 4, 256  # tokens; of a training step
_LEARNING_RATE = 4e-4
_GROUP = 32  # inputs; of a scale
_BITS = (8, 6, 5, 4)
# What a checkpoint packs: everything but embeddings, head and routers.
_PACKED = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")


# Fields of the dense model's config that the mixture keeps.
_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id"),
)


def upcycled() -> Any:
    """Returns the mixture before training: its experts are the demo target's MLPs, and some noise."""
    dense = AutoModelForCausalLM.from_pretrained(_DENSE, dtype=torch.float32)
    sizes = {name: getattr(dense.config, name) for name in _SHARED}
    config = MixtralConfig(
        **sizes, num_local_experts=_NUM_EXPERTS, num_experts_per_tok=_NUM_CHOSEN, router_aux_loss_coef=0.02
    )
    torch.manual_seed(0)
    # Grouped products of the experts and autocast to bfloat16 took 2.8 times as long on one thread.
    mixture: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    mixture.load_state_dict(dense.state_dict(), strict=False)
    with torch.no_grad():
        for layer, plain in zip(mixture.model.layers, dense.model.layers, strict=True):
            experts, mlp = layer.mlp.experts, plain.mlp
            for stacked, weights in (
                (experts.gate_up_proj, [mlp.gate_proj.weight, mlp.up_proj.weight]),
                (experts.down_proj, [mlp.down_proj.weight]),
            ):
                weight = torch.cat(weights)
                stacked.copy_(weight + _NOISE * weight.std() * torch.randn_like(stacked))
    return mixture


def train(mixture: Any, token_ids: torch.Tensor, seconds: float) -> dict[str, Any]:
    """Trains experts and routers for `seconds`; returns the number of steps and the mean of the last losses."""
    trained = [weight for name, weight in mixture.named_parameters() if ".mlp." in name]
    mixture.requires_grad_(False)
    for weight in trained:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, _LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    generator, end = torch.Generator().manual_seed(1), time.perf_counter() + seconds
    losses: list[float] = []
    while time.perf_counter() < end:
        left = (end - time.perf_counter()) / seconds
        optimizer.param_groups[0]["lr"] = _LEARNING_RATE * min(1.0, (len(losses) + 1) / 10, 0.05 + 2 * left)
        starts = torch.randint(len(token_ids) - _LENGTH, (_ROWS,), generator=generator).tolist()
        rows = torch.stack([token_ids[start : start + _LENGTH] for start in starts])
        loss = mixture(rows, labels=rows, output_router_logits=True, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"steps": len(losses), "loss": sum(losses[-20:]) / len(losses[-20:])}


def write_packed(plain: Path, folder: Path, num_bits: int) -> None:
    """Writes the checkpoint in compressed-tensors' pack-quantized: symmetric, a scale for 32 inputs."""
    shutil.copytree(plain, folder)
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith(_PACKED)]:
        weight, module = tensors.pop(name).float(), name.removesuffix(".weight")
        groups = weight.reshape(len(weight), -1, _GROUP)
        largest = 2 ** (num_bits - 1) - 1
        scales = (groups.abs().amax(2) / largest).to(torch.bfloat16)
        codes = (groups / scales.float()[..., None]).round().clamp(-largest - 1, largest).flatten(1)
        bits = (codes.long() + largest + 1)[..., None] >> torch.arange(num_bits) & 1
        words = bits.reshape(len(weight), -1, 32) << torch.arange(32)
        tensors[f"{module}.weight_packed"] = words.sum(2).to(torch.int32)
        tensors[f"{module}.weight_scale"] = scales
        tensors[f"{module}.weight_shape"] = torch.tensor(weight.shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    weights = {"num_bits": num_bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}
    groups_of = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups_of}
    settings["ignore"] = ["lm_head", "re:.*gate$"]
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


@torch.inference_mode()
def run(folder: Path, pieces: list[list[int]], **options: Any) -> tuple[torch.Tensor, float]:
    """Returns which experts each router chose, bool [layers, tokens, experts], and the perplexity."""
    loaded = load_model(str(folder), **options)
    blocks = list(range(-(-len(pieces[0]) // BLOCK_SIZE)))
    runner = ModelRunner(loaded, loaded.make_cache(len(blocks), BLOCK_SIZE))
    chosen: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, output: Any) -> None:
        indices = output[2]
        chosen.setdefault(name, []).append(
            torch.zeros(len(indices), _NUM_EXPERTS, dtype=torch.bool).scatter(1, indices, True)
        )

    routers = [name for name, module in loaded.model.named_modules() if type(module).__name__.endswith("Router")]
    for name in routers:
        module = loaded.model.get_submodule(name)
        module.register_forward_hook(lambda _module, _args, output, name=name: keep(name, output))
    loss = 0.0
    for piece in pieces:
        batch = build_batch([SessionRows(piece[:-1], 0, blocks, len(piece) - 1)], BLOCK_SIZE)
        logits = runner.forward(batch).logits.float()
        loss += float(torch.nn.functional.cross_entropy(logits, torch.tensor(piece[1:]), reduction="sum"))
    perplexity = math.exp(loss / sum(len(piece) - 1 for piece in pieces))
    return torch.stack([torch.cat(chosen[name]) for name in routers]), perplexity


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of the mixture, trained if it is not there.")],
    texts: Annotated[list[Path], typer.Argument(help="Text files.")],
    seconds: Annotated[float, typer.Option(help="Time of training.")] = 420.0,
    windows: Annotated[int, typer.Option(help="Windows of 256 tokens that are compared.")] = 40,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/router_flips.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.packed.router_flips .run/mixture docs/*.md gateway/*/*.py --no-save"""
    token_ids = Tokenizer.load(str(_DENSE)).encode("\n".join(text.read_text() for text in texts))
    held_out = token_ids[len(token_ids) * 9 // 10 :]
    pieces = [held_out[start : start + _LENGTH + 1] for start in range(0, len(held_out) - _LENGTH, _LENGTH)][:windows]
    plain = folder / "bf16"
    if not plain.exists():
        mixture = upcycled()
        report = train(mixture, torch.tensor(token_ids[: len(token_ids) * 9 // 10]), seconds)
        console.print(report)
        shutil.copytree(_DENSE, plain)
        mixture.to(torch.bfloat16).save_pretrained(plain)
    right, perplexity = run(plain, pieces)
    found = [_row("bfloat16", right, right, perplexity)]
    found.append(_row("float32", right, *run(plain, pieces, dtype="float32")))
    for num_bits in _BITS:
        packed = folder / f"w{num_bits}"
        if not packed.exists():
            write_packed(plain, packed, num_bits)
        for arithmetic in ("bf16", "int8"):
            choices, perplexity = run(packed, pieces, packed_arithmetic=arithmetic)
            found.append(_row(f"{num_bits} bits, products in {arithmetic}", right, choices, perplexity))
    console.print(_table(found))
    if save:
        print(f"rows appended to {save_rows('router_flips', found)}")


def _row(side: str, right: torch.Tensor, choices: torch.Tensor, perplexity: float) -> dict[str, Any]:
    flips = (right != choices).any(2).float()
    return {
        "side": side,
        "tokens": right.shape[1],
        "flipped": float(flips.mean()),
        "flipped_by_layer": flips.mean(1).tolist(),
        "least_used": float(right.float().mean(1).amin()),
        "perplexity": perplexity,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    title = f"{rows[0]['tokens']} tokens, {len(rows[0]['flipped_by_layer'])} layers"
    shown = table("side", "choices changed", "first layer", "last layer", "perplexity", title=title)
    for row in rows:
        layers = row["flipped_by_layer"]
        shares = [f"{100 * share:.2f} %" for share in (row["flipped"], layers[0], layers[-1])]
        shown.add_row(row["side"], *shares, f"{row['perplexity']:.3f}")
    return shown


if __name__ == "__main__":
    typer.run(main)
