"""A folder for a checkpoint whose tokenizer has an older form: tokenizer.json, and links to the other files.

transformers converts the tokenizer. Not here: where the folder is kept (made_folder).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from outrider.engine.errors import ModelRefused
from outrider.engine.model.folders.made_folder import made_folder
from outrider.shared.checkpoint.file_names import older_tokenizer

# version of the written files; changing it remakes the folders
_VERSION = 1


def tokenizer_folder(path: str) -> str:
    """Returns the folder made for a checkpoint; the path if its tokenizer needs no conversion. Raises ModelRefused."""
    source = Path(path).absolute()
    if not older_tokenizer(source):
        return path
    files = sorted(entry for entry in source.iterdir() if entry.is_file())
    # The folder keeps the name, as the model is served under it.
    return made_folder("tokenizers", _VERSION, source.name, files, lambda folder: _make(path, files, folder))


def _make(path: str, files: list[Path], folder: Path) -> None:
    _write_tokenizer(path, folder)
    written = {file.name for file in folder.iterdir()}
    for file in files:
        if file.name not in written:
            (folder / file.name).symlink_to(file)


def _write_tokenizer(path: str, folder: Path) -> None:
    from transformers import AutoTokenizer

    names = older_tokenizer(Path(path))
    if "tokenizer.model" in names and find_spec("sentencepiece") is None:
        raise ModelRefused(path, "its tokenizer.model needs sentencepiece", "pip install sentencepiece")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # tokenizers raises no class of its own
        cause = f"its tokenizer ({' and '.join(names)}) cannot be converted to tokenizer.json: {error!r}"
        raise ModelRefused(path, cause) from error
    if not (folder / "tokenizer.json").is_file():
        raise ModelRefused(path, f"its tokenizer, {type(tokenizer).__name__}, cannot be written as tokenizer.json")
