"""Is a GGUF file served as it is meant? Greedy float32 text against transformers' own reader of GGUF, token by token.

    python -m benchmarks.gguf.agreement MODEL.gguf [--draft DRAFT.gguf]

A token agrees if it is the argmax of transformers' logits after the same tokens. With --draft the text is generated
again with that draft model, and must have the same tokens. transformers drops RoPE scaling, so files that have some are
compared under the config that is made here for them, which the output says. Not here: other quantised formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.prompts import mixed_prompts
from outrider.engine.model.gguf.file import GgufFile, parts_of
from outrider.engine.model.gguf.folder import model_folder
from outrider.offline.llm import LLM
from outrider.shared.request_params import SamplingParams

_DRAFT_LEN = 4


@dataclass(frozen=True)
class Text:
    prompt_ids: list[int]
    token_ids: list[int]


@dataclass(frozen=True)
class Difference:
    """A place where a text leaves the oracle's. logit_gap: the oracle's best logit over that of our token."""

    text: int
    place: int
    logit_gap: float


def generate(
    file: Path,
    prompts: Sequence[object],
    num_tokens: int,
    speculative_config: Mapping[str, Any] | None,
    num_threads: int,
    max_model_len: int = 2048,
) -> list[Text]:
    """Greedy texts of exactly `num_tokens` tokens, in float32; prompts as LLM.generate takes them."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    options: dict[str, Any] = {"speculative_config": speculative_config, "num_threads": num_threads}
    with LLM(file, dtype="float32", max_model_len=max_model_len, **options) as llm:
        outputs = llm.generate(list(prompts), params)
    return [Text(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]


def oracle(file: Path) -> tuple[Any, str]:
    """(transformers' model in float32, whose config it has)"""
    options: dict[str, Any] = {}
    if has_scaled_rope(file):
        options["config"] = AutoConfig.from_pretrained(model_folder(str(file)))
    # transformers opens it by folder and name.
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32, **options)
    return model.eval(), "ours: it drops this file's RoPE scaling" if options else "its own"


def has_scaled_rope(file: Path) -> bool:
    content = GgufFile(str(file), parts_of(file))
    scaling = content.general(f"{content.architecture}.rope.scaling.type", "none")
    return scaling != "none" or "rope_freqs.weight" in content.tensors


@torch.inference_mode()
def differences(model: Any, texts: Sequence[Text]) -> list[Difference]:
    """The first place of each text where the oracle's argmax is another token."""
    found = []
    for number, text in enumerate(texts):
        ids = torch.tensor([text.prompt_ids + text.token_ids[:-1]])
        logits = model(ids, use_cache=False, logits_to_keep=len(text.token_ids)).logits[0].float()
        ours = logits.gather(1, torch.tensor(text.token_ids)[:, None])[:, 0]
        gaps = logits.max(dim=-1).values - ours
        if bool((gaps > 0).any()):
            place = int((gaps > 0).nonzero()[0])
            found.append(Difference(number, place, float(gaps[place])))
    return found


def main(
    file: Annotated[Path, typer.Argument(help="A .gguf file.")],
    draft: Annotated[Path | None, typer.Option(help="Draft model, of any vocabulary.")] = None,
    num_prompts: int = 20,
    num_tokens: int = 128,
    threads: Annotated[int, typer.Option(help="0: all cores.")] = 0,
) -> None:
    """Compare one file; ends with 1 if a token differs."""
    console = Console(highlight=False, soft_wrap=True)
    prompts = mixed_prompts(num_prompts)
    texts = generate(file, prompts, num_tokens, None, threads)
    num_wrong = 0
    if draft is not None:
        spec = {"model": str(draft), "method": "draft_model", "num_speculative_tokens": _DRAFT_LEN}
        drafted = generate(file, prompts, num_tokens, spec, threads)
        num_wrong = sum(plain != other for plain, other in zip(texts, drafted, strict=True))
        console.print(f"with {draft.name} as a draft model: {num_prompts - num_wrong} of {num_prompts} texts the same")
    if threads:
        torch.set_num_threads(threads)
    model, whose = oracle(file)
    found = differences(model, texts)
    same = num_prompts - len(found)
    console.print(
        f"{file.name}: {same} of {num_prompts} texts of {num_tokens} tokens are transformers' (config: {whose})"
    )
    for each in found:
        console.print(f"  text {each.text} leaves it at token {each.place}, by {each.logit_gap:.2g} of a logit")
    raise typer.Exit(1 if found or num_wrong else 0)


if __name__ == "__main__":
    typer.run(main)
