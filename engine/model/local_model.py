"""A model's name to a checkpoint folder: a folder, a .gguf file or an id of the Hugging Face Hub."""

from __future__ import annotations

from outrider.engine.model.gguf.folder import model_folder
from outrider.engine.model.tokenizer_folder import tokenizer_folder
from outrider.shared.checkpoint.hub import local_checkpoint


def local_model(name: str, setting: str) -> str:
    """setting: names it in errors. "", no model, stays as it is.

    Raises ConfigError: not to be had; ModelRefused: a GGUF file or a tokenizer that is not read.
    """
    if not name:
        return name
    return tokenizer_folder(model_folder(local_checkpoint(name, setting)))
