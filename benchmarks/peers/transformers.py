"""The peer transformers: its own generate, plain, assisted and with prompt lookup, in this process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "assistant_model": {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"},
    "prompt_lookup": {"prompt_lookup_num_tokens": 5},
}


@dataclass
class PeerRun:
    seconds: float
    num_tokens: int
    token_ids: list[list[int]]


class TransformersPeer:
    """Same weights, dtype, prompts and greedy settings as the stack under test."""

    def __init__(self, target: str, draft: str) -> None:
        transformers_logging.set_verbosity_error()  # it logs every call of generate
        transformers_logging.disable_progress_bar()
        self._tokenizer = AutoTokenizer.from_pretrained(target)
        self._target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
        self._draft = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.bfloat16).eval()
        self._draft.generation_config.num_assistant_tokens = 5
        self._draft.generation_config.num_assistant_tokens_schedule = "constant"
        # transformers stops a draft early below this confidence; 0, so that both sides draft five tokens.
        self._draft.generation_config.assistant_confidence_threshold = 0.0

    def run(self, variant: str, prompts: list[str], max_tokens: int) -> PeerRun:
        """One request after another: generate cannot speculate over a batch."""
        outputs: list[list[int]] = []
        options = dict(VARIANTS[variant])
        if variant == "assistant_model":
            options = {"assistant_model": self._draft}
        started = time.perf_counter()
        for prompt in prompts:
            inputs = self._tokenizer(prompt, return_tensors="pt")
            with torch.inference_mode():
                sequence = self._target.generate(
                    **inputs,
                    max_new_tokens=max_tokens,
                    min_new_tokens=max_tokens,
                    do_sample=False,
                    pad_token_id=0,
                    **options,
                )
            outputs.append(sequence[0, inputs["input_ids"].shape[1] :].tolist())
        seconds = time.perf_counter() - started
        return PeerRun(seconds, sum(map(len, outputs)), outputs)
