"""Folders of the models that a stack is given by name, before anything is started.

A Hub id is downloaded (shared/checkpoint/hub.py). GGUF files, checkpoints with an older tokenizer, and heads in
Mistral's layout get a folder, made by a process that has torch. Not here: what is in that folder (engine/model).
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from outrider.client.stack.commands import StackSettings
from outrider.client.stack.processes import Progress
from outrider.shared.checkpoint.architectures import require_served_architecture
from outrider.shared.checkpoint.file_names import native_weights, older_tokenizer
from outrider.shared.checkpoint.hub import hub_id, is_here, local_checkpoint, parse_hub_name
from outrider.shared.checkpoint.quantization import read_quantization, require_readable
from outrider.shared.draft_policy.named_drafts import with_paths
from outrider.shared.errors import ConfigError

_GGUF_ENDING = ".gguf"
_DEMO_MODELS = "models/demo-"  # names that `outrider demo` and the defaults of `up` have


def with_folders(settings: StackSettings, progress: Progress) -> StackSettings:
    """Returns the settings with model names replaced by folders. Raises ConfigError that names the option."""
    folder = checkpoint_folder(settings.model, "--model", progress)
    if settings.quantization:
        _require_format(settings.quantization, folder)
    drafts = with_paths(map(str, settings.drafts), lambda name: checkpoint_folder(name, "--draft-model", progress))
    verifier_args = settings.verifier_args
    served_name = hub_id(settings.model)
    if served_name and "--served-model-name" not in verifier_args:
        verifier_args = ("--served-model-name", served_name, *verifier_args)
    return replace(settings, model=folder, draft_model=",".join(drafts), verifier_args=verifier_args)


def checkpoint_folder(name: str, option: str, progress: Progress) -> str:
    """Returns a model's folder, after a download if needed. Raises ConfigError: it is not available or not readable."""
    is_target = option == "--model"
    if not is_here(name):
        if name.startswith(_DEMO_MODELS):
            raise ConfigError(
                f"{option}: there is no folder {name} here; "
                "the demo models are in the source repository, not in the wheel"
            )
        progress(f"looking for {name} on the Hugging Face Hub")
        hub_name = parse_hub_name(name)
        if is_target and hub_name and not hub_name.file:  # its config.json first: the weights may take hours
            _require_served(local_checkpoint(name, option, weights=False), option)
    path = local_checkpoint(name, option)
    if path.endswith(_GGUF_ENDING) and Path(path).is_file():
        if not _is_gguf(Path(path)):
            raise ConfigError(f"{option}: {path} is no GGUF file: it does not begin with GGUF")
        progress(f"reading {path}")
        path = _made_folder(path, option)
    elif native_weights(Path(path)):
        progress(f"converting {path} to the layout of transformers")
        path = _made_folder(path, option)
    elif older := older_tokenizer(Path(path)):
        progress(f"converting {' and '.join(older)} of {path} to tokenizer.json")
        path = _made_folder(path, option)
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"{option}: {path} is not a checkpoint folder (no config.json). Give the folder of an HF checkpoint, "
            f"a {_GGUF_ENDING} file or a Hub id"
        )
    try:
        require_readable(Path(path))
    except ConfigError as error:
        raise ConfigError(f"{option}: {path}: {error.message}") from error
    if is_target:
        _require_served(path, option)
    return path


def _require_served(folder: str, option: str) -> None:
    """Raises ConfigError if the model's architecture is not served; silent about draft heads, which have a check."""
    try:
        require_served_architecture(Path(folder))
    except ConfigError as error:
        from outrider.shared.checkpoint.draft_heads import is_draft_head  # needs safetensors, which the client lacks

        if not is_draft_head(Path(folder)):
            raise ConfigError(f"{option}: {folder}: {error.message}") from error


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _require_format(named: str, folder: str) -> None:
    """Raises ConfigError: vLLM's --quantization names another format than the folder's weights have."""
    found = read_quantization(Path(folder))
    has = found.method if found else ""
    # A kernel may be named behind the format: awq_marlin, gptq_marlin_24.
    if not has or not named.lower().replace("_", "-").startswith(has.replace("_", "-")):
        raise ConfigError(
            f"--quantization: {named} is named, and the weights of {folder} are "
            f"{f'quantised with {has}' if has else 'not quantised'}; leave the option out, or give another checkpoint"
        )


def _made_folder(path: str, option: str) -> str:
    command = [sys.executable, "-m", "outrider.engine.model", path]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise ConfigError(f"{option}: {_last_line(done.stderr) or f'{path} cannot be read'}")
    return _last_line(done.stdout)  # tokenizers prints remarks of its own before


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
