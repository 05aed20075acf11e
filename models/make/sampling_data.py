"""Samples the target's own continuations of training prompts, which a draft model is trained to predict.

Half of the rows are greedy or nearly so, half are sampled at temperatures near 1, since both kinds of requests are
served. Not for evaluation: prompts come from the training split. Used by `models.make.distill`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from models.make.tokenizer import SPECIAL_TOKENS

# Temperatures of the rows, repeated in this order: half of the rows at most 0.3, half from 0.8 to 1.
ROW_TEMPERATURES = (0.0, 0.8, 0.0, 0.9, 0.3, 1.0, 0.0, 1.0)


def pick_tokens(logits: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns int64[rows]: one token per row of logits[rows, vocab]; temperature 0 means the most likely one."""
    probs = torch.softmax(logits.float() / temperatures.clamp(min=1e-3).unsqueeze(1), dim=-1)
    sampled = torch.multinomial(probs, 1, generator=generator).squeeze(1)
    return torch.where(temperatures == 0, logits.argmax(dim=-1), sampled)


@torch.no_grad()
def continue_rows(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    temperatures: torch.Tensor,
    num_new_tokens: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Continues `prompts` int64[rows, prompt] past any stop token, all rows in lockstep.

    Returns int64[rows, prompt + new]. The generator is on the model's device; prompts and temperatures are moved there,
    the result to the CPU.
    """
    cache = DynamicCache(config=model.config)
    step_ids, temperatures = prompts.to(model.device), temperatures.to(model.device)
    rows = [step_ids]
    for _ in range(num_new_tokens):
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.dtype == torch.float32):
            outputs = model(input_ids=step_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        step_ids = pick_tokens(outputs.logits[:, -1], temperatures, generator).unsqueeze(1)
        rows.append(step_ids)
    return torch.cat(rows, dim=1).cpu()


def prompt_rows(
    token_ids: npt.NDArray[np.uint16], prompt_len: int, num_rows: int, rng: np.random.Generator
) -> torch.Tensor:
    """Returns int64[num_rows, prompt_len]: every fourth row starts at a chat document, the rest anywhere."""
    last_start = len(token_ids) - prompt_len
    user_id = SPECIAL_TOKENS.index("<|user|>")
    chat_starts = np.flatnonzero(np.asarray(token_ids[:last_start]) == user_id)
    starts = rng.integers(0, last_start, num_rows)
    if len(chat_starts):
        starts[::4] = rng.choice(chat_starts, len(starts[::4]))
    return torch.from_numpy(np.stack([token_ids[start : start + prompt_len].astype(np.int64) for start in starts]))


def sample_continuations(
    model: PreTrainedModel,
    token_ids: npt.NDArray[np.uint16],
    out: Path,
    num_batches: int,
    max_seconds: float,
    report: Callable[[str], None],
    rows_per_batch: int = 96,
    row_len: int = 256,
    seed: int = 11,
) -> int:
    """Writes uint16[rows, row_len] (.npy) of prompts and continuations; returns the number of rows.

    Prompt lengths vary by batch (32 to 128 tokens). Stops after `num_batches` or `max_seconds`, so the amount of data
    depends on the machine, but its distribution does not.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator(model.device).manual_seed(seed)
    repeats = -(-rows_per_batch // len(ROW_TEMPERATURES))
    temperatures = torch.tensor(ROW_TEMPERATURES * repeats)[:rows_per_batch]
    started, batches = time.monotonic(), []
    for index in range(num_batches):
        prompt_len = int(rng.choice([32, 64, 96, 128]))
        # prompt_rows puts chat prompts on every fourth row, and temperatures repeat with period 8: they are rotated
        # against each other, so that every temperature meets every kind of prompt.
        prompts = prompt_rows(token_ids, prompt_len, rows_per_batch, rng)
        rolled = temperatures.roll(index % len(ROW_TEMPERATURES))
        rows = continue_rows(model, prompts, rolled, row_len - prompt_len, generator)
        batches.append(rows.numpy().astype(np.uint16))
        seconds = time.monotonic() - started
        rate = (index + 1) * rows_per_batch * row_len / seconds
        report(f"batch {index + 1}/{num_batches}: {rate:,.0f} tokens/s, {seconds:.0f} s")
        if seconds > max_seconds:
            break
    data = np.concatenate(batches)
    np.save(out, data)
    return len(data)
