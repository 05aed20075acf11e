"""The files of target and drafts: are they whole, and do their tokenizers agree. What they hold is for the programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from client.doctor.check import Check

_HEADER_LEN_BYTES = 8
_LONGEST_HEADER_BYTES = 100_000_000  # safetensors' own bound


class Damaged(Exception):
    """A file is missing, cut short or not what its name says."""


def check_checkpoints(target: str, drafts: Sequence[str]) -> Iterator[Check]:
    for folder, option in [(target, "--model"), *((draft, "--draft-model") for draft in drafts)]:
        yield _files(Path(folder), option)
    if not (Path(target) / "tokenizer.json").is_file():
        yield Check("tokenizer", "fail", f"{target} holds no tokenizer.json", "convert the tokenizer to that form")
        return
    for draft in drafts:
        if (Path(draft) / "tokenizer.json").is_file():
            yield _tokenizers(Path(target), Path(draft))


def _files(folder: Path, option: str) -> Check:
    name = f"files of {folder.name or folder}"
    try:
        config = _read_object(folder / "config.json")
        num_bytes = _weights(folder)
    except Damaged as error:
        return Check(name, "fail", str(error), f"download the checkpoint again, or give {option}")
    architectures = ", ".join(config.get("architectures") or []) or "no architecture named"
    return Check(name, "ok", f"{architectures}, {num_bytes / 2**20:.0f} MiB of weights")


def _weights(folder: Path) -> int:
    """Bytes of all shards. Raises Damaged."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_object(index).get("weight_map")
        names = sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise Damaged(f"{folder} holds no *.safetensors; other forms are not read")
    return sum(_shard(folder / name) for name in names)


def _shard(path: Path) -> int:
    """Bytes of the file. Raises Damaged where they are fewer than its header says: a download that was cut off."""
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_len = int.from_bytes(file.read(_HEADER_LEN_BYTES), "little")
            if header_len > _LONGEST_HEADER_BYTES:
                raise Damaged(f"{path} is no safetensors file")
            header = json.loads(file.read(header_len))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(f"{path} is no safetensors file") from None
    wanted = _HEADER_LEN_BYTES + header_len + max(ends, default=0)
    if num_bytes < wanted:
        raise Damaged(f"{path} is cut short: {num_bytes} of {wanted} bytes")
    return num_bytes


def _tokenizers(target: Path, draft: Path) -> Check:
    name = f"tokenizer of {draft.name}"
    try:
        same = _vocabulary(target) == _vocabulary(draft)
    except Damaged as error:
        return Check(name, "fail", str(error), "download the checkpoint again")
    if same:
        return Check(name, "ok", "the target's")
    advice = "nothing has to be done; a draft model with the target's tokenizer is faster and accepted more often"
    return Check(name, "warn", "another vocabulary than the target's: drafts are translated", advice)


def _vocabulary(folder: Path) -> tuple[Any, list[tuple[int, str]]]:
    """Entries with their ids. Raises Damaged."""
    tokenizer = _read_object(folder / "tokenizer.json")
    model = tokenizer.get("model")
    added = [(entry["id"], entry["content"]) for entry in tokenizer.get("added_tokens") or []]
    return (model.get("vocab") if isinstance(model, dict) else None), sorted(added)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise Damaged(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Damaged(f"{path} holds no JSON object")
    return value
