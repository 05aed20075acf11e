"""The `train` command: its options, collected into the run's config.

Not here: the run (training/train.py). Run: `outrider train train --help`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from outrider.shared.checkpoint.hub import local_checkpoint
from outrider.shared.command_line import from_arguments
from outrider.shared.machine.memory import use_huge_pages
from outrider.training.commands.errors import clear_errors
from outrider.training.commands.output import Json, print_result, progress_console

_METHODS = "medusa, mlp_speculator, eagle, eagle3, dspark, dflash, mtp or draft_model"
Data = Annotated[list[Path], typer.Option(help="JSONL from prepare-data, or .txt, .npy, .bin; may be repeated.")]
EvalData = Annotated[list[Path] | None, typer.Option(help="Held-out data; may be repeated.")]
Target = Annotated[str, typer.Option(help="The target: folder, .gguf file or Hub id.")]
TargetName = Annotated[str, typer.Option(help="The target's name in the exported config; empty: --target.")]
FeatureLayers = Annotated[
    list[int] | None, typer.Option("--feature-layer", help="eagle3, dspark, dflash: layer to read; may be repeated.")
]

Precision = Annotated[
    str, typer.Option(help="bf16 (autocast over float32 weights), fp32, or auto: bf16 where the machine multiplies it.")
]
HiddenStates = Annotated[
    Path | None,
    typer.Option(help="Folder that a verifier wrote with --record-hidden-states: the target is not run over the data."),
]


def train(
    method: Annotated[str, typer.Option(help=_METHODS)],
    target: Target,
    data: Data,
    output: Annotated[Path, typer.Option(help="Folder of the run; the finished head is in its model/.")],
    resume: Annotated[bool, typer.Option(help="Continue the run in --output, if there is one.")] = False,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 1000,
    batch_size: Annotated[
        int | None, typer.Option(help="Windows per batch. [default: 8, or 4, 2, 1 and more batches per step to fit]")
    ] = None,
    accumulation: Annotated[int, typer.Option(help="Batches per step.")] = 1,
    seq_len: Annotated[int, typer.Option(help="Longest window in tokens.")] = 512,
    lr: float = 1e-3,
    warmup_steps: int = 50,
    weight_decay: float = 0.01,
    max_grad_norm: float = 1.0,
    optimizer: Annotated[str, typer.Option(help="adamw, or muon for the matrices inside layers.")] = "adamw",
    precision: Precision = "auto",
    seed: int = 0,
    hidden_states: HiddenStates = None,
    train_on_prompts: Annotated[bool, typer.Option(help="Train on prompt tokens too, where known.")] = False,
    eval_data: EvalData = None,
    eval_batches: int = 8,
    eval_every: int = 200,
    checkpoint_every: int = 100,
    log_every: int = 10,
    dtype: Annotated[str, typer.Option(help="Data type of the exported head.")] = "bfloat16",
    target_name: TargetName = "",
    device: Annotated[str, typer.Option(help="cpu, or auto: accelerate's choice.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: torch's choice.")] = 0,
    num_heads: Annotated[int, typer.Option(help="medusa: number of heads; mlp_speculator: number of steps.")] = 4,
    num_layers: Annotated[
        int, typer.Option(help="medusa, eagle, dspark, dflash, draft_model: layers; 0: 1, for draft_model 2.")
    ] = 0,
    inner_dim: Annotated[
        int, typer.Option(help="mlp_speculator, draft_model: width; 0: the target's, for draft_model 192.")
    ] = 0,
    intermediate_size: Annotated[
        int, typer.Option(help="eagle, eagle3, dspark, dflash, draft_model: MLP width; 0: the target's.")
    ] = 0,
    num_attention_heads: Annotated[
        int, typer.Option(help="eagle, eagle3, dspark, dflash, draft_model; 0: the target's.")
    ] = 0,
    share_lm_head: Annotated[bool, typer.Option(help="medusa: use the target's output head.")] = True,
    tie_weights: Annotated[bool, typer.Option(help="mlp_speculator.")] = True,
    loss: Annotated[
        str, typer.Option(help="cross_entropy, or acceptance: the expected acceptance itself (its negative logarithm).")
    ] = "cross_entropy",
    distil: Annotated[
        bool, typer.Option(help="medusa, mlp_speculator: use the target's distribution as label.")
    ] = True,
    ttt_steps: Annotated[int, typer.Option(help="eagle, eagle3, mtp: training-time-test steps; 0: 1, 5 and 3.")] = 0,
    law_weight: Annotated[float, typer.Option(help="eagle: weight of the soft cross-entropy (regression: 1).")] = 0.1,
    feature_noise: Annotated[float, typer.Option(help="eagle: half-width of the uniform feature noise.")] = 0.1,
    fc_bias: Annotated[bool, typer.Option(help="eagle: a bias in the first linear; vLLM does not read one.")] = False,
    block_size: Annotated[int, typer.Option(help="dspark, dflash: tokens of a draft; 0: 5.")] = 0,
    markov_rank: Annotated[int, typer.Option(help="dspark: rank of its Markov head; 0: 64.")] = 0,
    draft_vocab_size: Annotated[
        int, typer.Option(help="eagle3, dspark, dflash: number of most frequent tokens to use; 0: all.")
    ] = 0,
    feature_layer: FeatureLayers = None,
    norm_before_residual: Annotated[bool, typer.Option(help="eagle3.")] = True,
    norm_output: Annotated[bool, typer.Option(help="eagle3: feed the normed feature back.")] = False,
    save_embedding: Annotated[bool, typer.Option(help="eagle, eagle3: include the target's embedding.")] = True,
    init: Annotated[
        Path | None, typer.Option(help="eagle3, dspark, dflash, medusa, draft_model: train this one further.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a draft head, the target's MTP layer, or a draft model against the frozen target.

    Examples:

      outrider train train --method eagle3 --target models/demo-target --data data.jsonl --output .run/eagle3

      outrider train train --method medusa --target ~/llama --data data.jsonl --output .run/medusa --resume

      outrider train train --method dspark --target ~/llama --data data.jsonl --output .run/dspark --optimizer muon

      outrider train train --method mtp --target ~/qwen3.5 --data data.jsonl --output .run/mtp

      outrider train train --method eagle3 --init ~/head --target ~/llama --data more.jsonl --output .run/further
    """
    with clear_errors():
        from outrider.training.heads.options import HeadOptions
        from outrider.training.run_config import OptimizationConfig, RunConfig

        given = locals()
        config = from_arguments(
            RunConfig,
            given,
            target=Path(local_checkpoint(target, "--target")),
            data=tuple(data),
            head=from_arguments(HeadOptions, given, feature_layers=tuple(feature_layer or ())),
            optimization=from_arguments(
                OptimizationConfig,
                given,
                batch_size=OptimizationConfig.batch_size if batch_size is None else batch_size,
            ),
            fit_batch=batch_size is None,
            count_prompts=train_on_prompts,
            eval_data=tuple(eval_data or ()),
            export_dtype=dtype,
            target_name=target_name or target,
        )
        config.check()
        from accelerate import PartialState  # after the settings are known to be right: torch takes seconds to import

        from outrider.engine.model.local_model import local_model
        from outrider.training.progress import Progress
        from outrider.training.run_record import last_rows
        from outrider.training.train import run

        config = replace(config, target=Path(local_model(str(config.target), "--target")))
        if device == "cpu":
            use_huge_pages()
        model_dir = run(config, Progress(progress_console(as_json=as_json), method))
        if PartialState().is_main_process:  # if several processes train, one prints
            result = {"model": str(model_dir), "method": method, **last_rows(output)}
            print_result(f"{model_dir}: the finished head", result, as_json=as_json)
