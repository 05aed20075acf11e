"""A model's name to the files on this machine: a folder, a .gguf file, or an id of the Hugging Face Hub.

    models/llama                     a folder
    models/llama.Q4_K_M.gguf         a file
    ORG/NAME, ORG/NAME@REVISION      a repository of the Hub
    ORG/NAME:Q4_K_M, ORG/NAME:FILE.gguf   one GGUF file of a repository (all its parts)

huggingface_hub does the work, so its cache and its variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) hold here
too, an interrupted download is resumed, and its progress is shown. Only files that are read here are downloaded.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from outrider.shared.checkpoint.file_names import PARAMS_FILE
from outrider.shared.errors import ConfigError

log = logging.getLogger(__name__)

_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<file>[\w./-]+))?")
_SETTINGS = (
    *("config.json", "generation_config.json", "chat_template*.json", "chat_template*.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "*.model"),
    *("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quant_model_description.json"),
)
# The first kind that a repository has is read.
_WEIGHTS = (
    ("model*.safetensors", "model.safetensors.index.json"),
    ("*.safetensors", "*.safetensors.index.json"),
    ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
    ("medusa_lm_head.pt",),
)
# Mistral's own layout; read where a repository has no config.json, else a copy.
_NATIVE = "consolidated*"
_NEVER = (_NATIVE, "*/*")


@dataclass(frozen=True)
class HubName:
    """A parsed model name of the Hub.

    file: a file's name, or a part of a GGUF file's name (Q4_K_M); "": the repository's folder.
    """

    repo: str
    revision: str | None
    file: str


def local_checkpoint(name: str, setting: str, *, weights: bool = True) -> str:
    """The folder, or the .gguf file, of the model `name`; downloaded if it is not here yet.

    setting: names it in errors. weights: False: only what a tokenizer and a config need. Raises ConfigError.
    """
    if not name:
        return name
    if is_here(name):
        return str(Path(name).expanduser())
    hub_name = parse_hub_name(name)
    if hub_name is None:
        raise ConfigError(
            f"{setting}: {name} does not exist, and is no id of the Hugging Face Hub (ORG/NAME, ORG/NAME@REVISION, "
            "ORG/NAME:Q4_K_M)"
        )
    return _download(hub_name, setting, weights=weights)


def local_data_file(name: str, setting: str) -> Path:
    """The file `name`, or ORG/NAME:FILE of a data set of the Hub, downloaded if it is not here yet.

    setting: names it in errors. Raises ConfigError.
    """
    if is_here(name):
        return Path(name).expanduser()
    hub_name = parse_hub_name(name)
    if hub_name is None or not hub_name.file:
        raise ConfigError(
            f"{setting}: {name} does not exist, and is no file of a data set of the Hugging Face Hub "
            "(ORG/NAME:FILE.jsonl, ORG/NAME@REVISION:FILE.jsonl)"
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        return Path(
            hf_hub_download(hub_name.repo, hub_name.file, repo_type="dataset", revision=hub_name.revision or "main")
        )
    except RemoteEntryNotFoundError as error:
        raise ConfigError(f"{setting}: the data set {hub_name.repo} has no file {hub_name.file}") from error
    except Exception as error:
        raise ConfigError(f"{setting}: {_explanation(hub_name, error)}") from error


def is_here(name: str) -> bool:
    """Returns whether the model `name` is a folder or file of this machine, which takes precedence over a Hub id."""
    return Path(name).expanduser().exists()


def hub_id(name: str) -> str:
    """The name of a Hub id in requests, as vLLM has it; "": a folder or file here, which goes by its own name."""
    return "" if is_here(name) else name


def parse_hub_name(name: str) -> HubName | None:
    """Parses a Hub name; None: it can only be a path."""
    match = _ID.fullmatch(name)
    if match is None or name.startswith((".", "~")):
        return None
    return HubName(match["repo"], match["revision"], match["file"] or "")


def with_revision(name: str, revision: str, setting: str) -> str:
    """The Hub id `name` at a branch, tag or commit; "": as `name` says. setting: names it in errors.

    Raises ConfigError: `name` has no revisions, or names another one.
    """
    if not revision:
        return name
    hub_name = None if is_here(name) else parse_hub_name(name)
    if hub_name is None:
        raise ConfigError(f"{setting}: {name} is no id of the Hugging Face Hub, and files here have no revisions")
    if hub_name.revision not in (None, revision):
        raise ConfigError(f"{setting}: {revision} is given, and {name} names {hub_name.revision}; give one of them")
    named = f"{hub_name.repo}@{revision}" + (f":{hub_name.file}" if hub_name.file else "")
    if parse_hub_name(named) is None:
        raise ConfigError(f"{setting}: {revision!r} is no branch, tag or commit")
    return named


def files_to_read(hub_name: HubName, files: Iterable[str], *, weights: bool = True) -> list[str]:
    """Returns the files of a repository to download, in order. Raises ConfigError when it has no weights to read."""
    files = sorted(files)
    if PARAMS_FILE in files and "config.json" not in files and not hub_name.file:
        return [PARAMS_FILE, *(file for file in files if weights and fnmatch(file, f"{_NATIVE}.safetensors"))]
    files = [file for file in files if not any(fnmatch(file, pattern) for pattern in _NEVER)]
    if hub_name.file:
        return _gguf_parts(hub_name, files)
    chosen = [file for file in files if any(fnmatch(file, pattern) for pattern in _SETTINGS)]
    if not weights:
        return chosen
    for patterns in _WEIGHTS:
        found = [file for file in files if any(fnmatch(file, pattern) for pattern in patterns)]
        if found:
            return chosen + found
    ggufs = [file for file in files if file.endswith(".gguf")]
    hint = f"name one of its files: {', '.join(f'{hub_name.repo}:{file}' for file in ggufs[:3])}" if ggufs else ""
    raise ConfigError(
        f"{hub_name.repo} has neither safetensors nor pytorch_model.bin; {hint or 'choose another model'}"
    )


def _gguf_parts(hub_name: HubName, files: list[str]) -> list[str]:
    ggufs = [file for file in files if file.endswith(".gguf") and not file.startswith("mmproj")]
    found = [file for file in ggufs if file == hub_name.file]
    found = found or [file for file in ggufs if hub_name.file.lower() in re.split(r"[.-]", file.lower())]
    # The parts of one model differ in their numbers only.
    models = {re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", file) for file in found}
    if len(models) == 1:
        stem = models.pop()
        return [file for file in ggufs if file == stem or file.startswith(f"{stem}-")] if len(found) > 1 else found
    problem = "several GGUF files fit" if models else "no GGUF file fits"
    raise ConfigError(f"{hub_name.repo}: {problem} {hub_name.file!r}; it has {', '.join(ggufs) or 'none'}")


def _download(hub_name: HubName, setting: str, *, weights: bool) -> str:
    from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    where: dict[str, Any] = {"repo_id": hub_name.repo, "revision": hub_name.revision}
    try:
        try:
            info = HfApi().model_info(**where, files_metadata=True)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
            files = files_to_read(hub_name, sizes, weights=weights)
            is_here = [try_to_load_from_cache(hub_name.repo, file, revision=info.sha) is not None for file in files]
            num_bytes = sum(sizes[file] for file, here in zip(files, is_here, strict=True) if not here)
            _require_room(constants.HF_HUB_CACHE, num_bytes)
            folder = snapshot_download(**where, allow_patterns=files)
        except HfHubHTTPError:
            raise
        except (OfflineModeIsEnabled, _http_error()) as error:
            folder = _cached(where, error)
            files = files_to_read(hub_name, os.listdir(folder), weights=weights)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error.message}") from None
    except Exception as error:
        raise ConfigError(f"{setting}: {_explanation(hub_name, error)}") from error
    return os.path.join(folder, files[0]) if hub_name.file else folder


def _cached(where: dict[str, Any], error: Exception) -> str:
    """The repository's folder in the cache. Raises `error`, why the Hub was not asked, when there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder: str = snapshot_download(**where, local_files_only=True, allow_patterns=["config.json"])
    except LocalEntryNotFoundError:
        raise error from None
    log.info("%s is read from the cache; the Hub was not reached (%s)", where["repo_id"], type(error).__name__)
    return folder


def _http_error() -> type[Exception]:
    """Returns the error that the Hub client raises when it gets no answer: httpx's or httpx2's, by its version."""
    from huggingface_hub import errors

    return errors.HTTPError  # type: ignore[attr-defined]


def _require_room(cache: str, num_bytes: int) -> None:
    os.makedirs(cache, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if num_bytes > free:
        raise ConfigError(
            f"the download takes {num_bytes / 1e9:.1f} GB and {cache} has {free / 1e9:.1f} GB free; "
            "set HF_HOME to a folder on a larger disk"
        )


def _explanation(hub_name: HubName, error: Exception) -> str:
    """Returns one line that says what to do."""
    from huggingface_hub import constants, errors

    repo, url = hub_name.repo, f"{constants.ENDPOINT}/{hub_name.repo}"
    no_folder = f"there is no folder {repo} here, and"
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated: accept its terms at {url}, then set HF_TOKEN to a token of yours"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {hub_name.revision}; see {url}/refs"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{no_folder} no such repository at {constants.ENDPOINT} (a private one needs HF_TOKEN)"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{no_folder} HF_HUB_OFFLINE is set while the cache does not hold it; unset it once to download"
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        return f"{constants.ENDPOINT} answered {error.response.status_code} for {repo}; try again later"
    if isinstance(error, _http_error()):
        return (
            f"{no_folder} {constants.ENDPOINT} cannot be reached, nor is it in the cache; check network and HF_ENDPOINT"
        )
    return f"{repo} could not be downloaded: {error}"
