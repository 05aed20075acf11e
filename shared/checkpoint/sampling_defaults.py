"""Sampling parameters of requests that leave them out, by vLLM's two settings.

`--generation-config` names the generation_config.json that they come from, `--override-generation-config` replaces
single values of it. As in vLLM, do_sample is not read: temperature 0 is what makes an answer greedy. Not here: where
an output ends (engine/model/end_of_text.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.shared.checkpoint.json_file import read_object
from outrider.shared.errors import ConfigError, InvalidRequest
from outrider.shared.sampling_params import SamplingParams

log = logging.getLogger(__name__)

AUTO, NEUTRAL = "auto", "vllm"
_FILE = "generation_config.json"
_LENGTH = "max_new_tokens"
_INTEGERS = ("top_k", _LENGTH)
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", _LENGTH)
_SETTING, _OVERRIDE = "--generation-config", "--override-generation-config"


@dataclass(frozen=True)
class SamplingDefaults:
    """The sampling defaults of requests.

    max_tokens: for chats that give none; None: the room in the context. max_tokens_limit: for all requests.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    max_tokens_limit: int | None = None


def load_sampling_defaults(model: str, generation_config: str, override: str) -> SamplingDefaults:
    """Loads the defaults from the checkpoint or another folder, then applies the override.

    model: the checkpoint's folder. generation_config: AUTO, NEUTRAL or a folder. override: a JSON object or "".
    A length that was set here, not by the checkpoint, is a limit too, as in vLLM.
    Raises ConfigError that names the setting, the file and the field.
    """
    given: dict[str, Any] = {}
    if generation_config != NEUTRAL:
        given = _of_folder(Path(model if generation_config == AUTO else generation_config), generation_config)
    replaced = _replaced(override)
    given = {name: value for name, value in {**given, **replaced}.items() if value is not None}
    if not given:
        return SamplingDefaults()
    log.info(
        "sampling defaults of requests: %s (%s %s: none of the checkpoint's)", json.dumps(given), _SETTING, NEUTRAL
    )
    max_tokens = given.pop(_LENGTH, None)
    limit = max_tokens if generation_config not in (AUTO, NEUTRAL) else replaced.get(_LENGTH)
    return SamplingDefaults(**given, max_tokens=max_tokens, max_tokens_limit=limit)


def _of_folder(folder: Path, generation_config: str) -> dict[str, Any]:
    path = folder / _FILE
    if generation_config != AUTO and not path.is_file():
        raise ConfigError(
            f"{_SETTING}: {folder} has no {_FILE}; give {AUTO}, {NEUTRAL} or a folder with one",
            param="generation_config",
        )
    try:
        found = read_object(path)
        return _checked({name: found[name] for name in _NAMES if name in found}, f"{path}: ")
    except ConfigError as error:
        raise ConfigError(
            f"{_SETTING}: {error.message}; correct the file, or give {NEUTRAL} to use none of it",
            param="generation_config",
        ) from None


def _replaced(override: str) -> dict[str, Any]:
    """Parses the override; null removes the checkpoint's value."""
    if not override:
        return {}
    try:
        found = json.loads(override)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{_OVERRIDE} is not JSON: {error}", param="override_generation_config") from None
    try:
        if not isinstance(found, dict):
            raise ConfigError("must be a JSON object")
        for name in found.keys() - set(_NAMES):
            raise ConfigError(f"{name} is no sampling default; known are {', '.join(_NAMES)}")
        return _checked(found, "")
    except ConfigError as error:
        raise ConfigError(f"{_OVERRIDE}: {error.message}", param="override_generation_config") from None


def _checked(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Checks the values against their ranges. Raises ConfigError: `where`, then the field and its range."""
    checked = {}
    for name, value in given.items():
        kind = int if name in _INTEGERS else int | float
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            whole = "a whole number" if name in _INTEGERS else "a number"
            raise ConfigError(f"{where}{name} must be {whole}, got {value!r}")
        if name == "top_k" and value == -1:
            value = 0
        checked[name] = value
        try:
            if value is not None:
                SamplingParams(**{"max_tokens" if name == _LENGTH else name: value}).validate()
        except InvalidRequest as error:
            raise ConfigError(f"{where}{error.message.replace('max_tokens', _LENGTH)}") from None
    return checked
