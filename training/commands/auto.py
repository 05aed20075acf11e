"""The `auto` command: one line from a model to a head that is measured on this machine.

Not here: the steps (training/auto). Run: `outrider train auto --help`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.shared.command_line import from_arguments
from outrider.shared.machine.memory import use_huge_pages
from outrider.training.commands.errors import clear_errors
from outrider.training.commands.output import Json, print_result, progress_console

Model = Annotated[str, typer.Argument(help="The target: folder, .gguf file or Hub id.", metavar="MODEL")]
Output = Annotated[
    Path | None, typer.Option(help="Folder of the run; the head is in its model/. [default: .run/auto-NAME]")
]


def auto(
    model: Model,
    output: Output = None,
    prompts: Annotated[
        str,
        typer.Option(
            help="Text (one prompt per line) or JSONL: a file, or ORG/NAME:FILE of a data set of the Hugging Face Hub; "
            "empty: the model writes its questions itself."
        ),
    ] = "",
    until: Annotated[
        float | None, typer.Option(help="Stop at this many tokens a round, on held-out answers.", show_default=False)
    ] = None,
    hours: Annotated[float, typer.Option(help="Stop after this time, all steps together.")] = 2.0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 192,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Train an EAGLE-3 head for a model and measure whether it pays on this machine: one command for all steps.

    The model writes questions and answers, a head is trained on them and exported, and a stack answers held-out
    questions with the head and without. Repeat the command to continue where it stopped.

    Examples:

      outrider train auto models/demo-target --hours 0.1

      outrider train auto Qwen/Qwen3-0.6B --until 2.5 --hours 8

      outrider train auto ~/checkpoints/llama --prompts questions.jsonl --output .run/llama-head
    """
    with clear_errors():
        from outrider.training.auto.config import AutoConfig

        output = output or Path(".run") / f"auto-{Path(model).stem}"
        config = from_arguments(AutoConfig, locals())
        config.check()
        from outrider.training.auto.pipeline import run_auto  # now: torch takes seconds to import
        from outrider.training.progress import Progress

        use_huge_pages()
        console = progress_console(as_json=as_json)
        state, verdict = run_auto(config, lambda what: Progress(console, what))
        head = config.output / "model"
        words = (
            f"{head}: the head, {state.tokens_per_round:.2f} tokens a round on held-out answers; "
            f"{config.output / 'curves.png'}: its curves\n{verdict.sentence()}\n{verdict.serve_line(model, head)}"
        )
        values = {"model": str(head), "tokens_per_round": state.tokens_per_round, "pays": verdict.pays}
        print_result(words, values | state.verdict | {"serve": verdict.serve_line(model, head)}, as_json=as_json)
