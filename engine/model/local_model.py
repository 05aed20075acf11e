"""Resolves a model's name to a checkpoint folder: a folder, a .gguf file or an id of the Hugging Face Hub."""

from __future__ import annotations

from outrider.engine.model.folders.mistral_folder import mistral_folder
from outrider.engine.model.folders.tokenizer_folder import tokenizer_folder
from outrider.engine.model.gguf.folder import model_folder
from outrider.shared.checkpoint.hub import local_checkpoint


def local_model(name: str, setting: str) -> str:
    """Returns the model's folder. setting: its name in errors. The empty name, no model, is returned unchanged.

    Raises ConfigError if there is no such model, ModelRefused for a GGUF file, a tokenizer or a head that is not read.
    """
    if not name:
        return name
    return mistral_folder(tokenizer_folder(model_folder(local_checkpoint(name, setting))))
