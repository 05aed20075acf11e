"""A folder for a GGUF file: config.json, generation_config.json, the tokenizer, and links to the file's parts.

Every service takes such a folder as it takes a checkpoint's. Not here: what is written (config, tokenizer), where it is
kept (made_folder), reading the weights (tensors).
"""

from __future__ import annotations

import json
from pathlib import Path

from outrider.engine.errors import ModelRefused
from outrider.engine.model.folders.made_folder import made_folder
from outrider.engine.model.gguf.file import GgufFile, parts_of
from outrider.shared.checkpoint.file_names import GGUF_PARTS
from outrider.shared.checkpoint.quantization import require_readable
from outrider.shared.errors import ConfigError

# version of the written files; changing it remakes the folders
_VERSION = 5


def model_folder(path: str) -> str:
    """Returns the folder of a `.gguf` file; any other path unchanged. Raises ModelRefused."""
    file = Path(path)
    if file.suffix != ".gguf":
        return path
    if not file.is_file():
        raise ModelRefused(path, "there is no such file")
    parts = [part.resolve() for part in parts_of(file)]
    # The stem is the name that the model is served by.
    return made_folder("gguf", _VERSION, parts[0].stem, parts, lambda folder: _make(path, parts, folder))


def _make(path: str, parts: list[Path], folder: Path) -> None:
    # The records of architectures load torch, which a path that names no such file does not need.
    from outrider.engine.model.gguf.config import eos_token_ids, model_config
    from outrider.engine.model.gguf.tokenizer import write_tokenizer

    file = GgufFile(path, parts)
    config = model_config(file)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    ends = {"eos_token_id": eos_token_ids(file), "bos_token_id": config["bos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    try:
        require_readable(folder)
    except ConfigError as error:
        raise ModelRefused(path, error.message) from error
    write_tokenizer(file, parts[0], folder)
    (folder / GGUF_PARTS).write_text(json.dumps([part.name for part in parts]))
    for part in parts:
        (folder / part.name).symlink_to(part)
