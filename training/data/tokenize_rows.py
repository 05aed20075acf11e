"""Tokenizes training rows without token ids, with the target's tokenizer and chat template.

Not here: reading files (head_data.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from outrider.training.data.prompts import prompt_of_row
from outrider.training.errors import DataError, PromptError, SettingError


class RowEncoder:
    """Encodes rows: `RowEncoder(target)(row)` returns (token ids, length of the prompt).

    The tokenizer is loaded at the first row.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._tokenizer: Any = None

    def __call__(self, row: dict[str, Any]) -> tuple[list[int], int]:
        """Tokenizes a row.

        row: {"text"}, or a prompt (training.data.prompts) with a completion. Raises DataError, SettingError.
        """
        tokenizer = self._load()
        if isinstance(row.get("text"), str):
            return self._ids(row["text"]), 0
        if "conversations" in row and "completion" not in row:
            row = _answered(row)
        completion = row.get("completion")
        if not isinstance(completion, str):
            raise DataError("must have a text, or a prompt and its completion")
        try:
            prompt = prompt_of_row(row)
        except PromptError as error:
            raise DataError(str(error)) from error
        if prompt.messages is not None:
            rendered = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
            prompt_ids = tokenizer(rendered, add_special_tokens=False).input_ids
        else:
            prompt_ids = list(prompt.token_ids) if prompt.token_ids is not None else self._ids(prompt.text or "", True)
        return [*prompt_ids, *self._ids(completion)], len(prompt_ids)

    def _ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._load()(text, add_special_tokens=add_special_tokens).input_ids
        return ids

    def _load(self) -> Any:
        if self._tokenizer is None:
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._target, trust_remote_code=False)
            except (OSError, ValueError) as error:
                raise SettingError(f"--target {self._target} has no tokenizer that can be loaded: {error}") from error
        return self._tokenizer


def _answered(row: dict[str, Any]) -> dict[str, Any]:
    """Splits a ShareGPT row: an assistant's last turn is the completion of the turns before."""
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns or not isinstance(turns[-1], dict):
        raise DataError("conversations must be a list of turns")
    if turns[-1].get("from") not in ("gpt", "assistant"):
        raise DataError("conversations does not end with the assistant's turn")
    return {"conversations": turns[:-1], "completion": turns[-1].get("value")}
