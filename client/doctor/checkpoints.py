"""Checks target and draft files: complete, same tokenizer, heads of this target. Not here: what they contain
(programs.py).
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from outrider.client.doctor.check import Check
from outrider.shared.checkpoint.draft_heads import is_draft_head, longest_context, mismatch, target_name
from outrider.shared.checkpoint.file_names import linked_parts, older_tokenizer, weight_files
from outrider.shared.checkpoint.json_file import text_config
from outrider.shared.errors import ConfigError

_HEADER_LEN_BYTES = 8
_LONGEST_HEADER_BYTES = 100_000_000  # safetensors' own limit


class Damaged(Exception):
    """A file is missing, truncated or not in its format."""


def check_checkpoints(target: str, drafts: Sequence[str]) -> Iterator[Check]:
    if (Path(target) / "config.json").is_file() and is_draft_head(Path(target)):
        of = target_name(_read_object(Path(target) / "config.json"))
        found = f"{target} is a draft head{f' of {of}' if of else ''}, not a model"
        yield Check("model", "fail", found, "serve its target, with this as its draft")
        return
    for folder, option in [(target, "--model"), *((draft, "--draft-model") for draft in drafts)]:
        yield _files(Path(folder), option)
    if older := older_tokenizer(Path(target)):
        yield Check("tokenizer", "ok", f"{' and '.join(older)}, converted to tokenizer.json at start")
        return
    if not (Path(target) / "tokenizer.json").is_file():
        yield Check("tokenizer", "fail", f"{target} has no tokenizer.json", "add the tokenizer's files")
        return
    for draft in drafts:
        yield from _of_target(Path(draft), Path(target))
        if (Path(draft) / "tokenizer.json").is_file():
            yield _tokenizers(Path(target), Path(draft))


def check_context(target: str, max_model_len: int) -> Iterator[Check]:
    """Checks that the model's context covers --max-model-len; 0: its own length."""
    try:
        longest = longest_context(_read_object(Path(target) / "config.json"))
    except Damaged:
        return  # which another check reports
    if longest is not None and max_model_len > longest:
        found = f"{max_model_len} is above the {longest} positions of {target}"
        yield Check("--max-model-len", "fail", found, f"give at most {longest}")


def check_ranks(target: str, num_ranks: int) -> Iterator[Check]:
    """Checks that each rank of --tensor-parallel-size gets a KV head; latents (MLA) are shared by attention heads."""
    try:
        config = text_config(_read_object(Path(target) / "config.json"))
    except Damaged:
        return  # which another check reports
    heads = "num_attention_heads" if "kv_lora_rank" in config else "num_key_value_heads"
    num_heads = config.get(heads) or config.get("num_attention_heads")
    if isinstance(num_heads, int) and num_ranks > num_heads:
        found = f"{num_ranks} ranks cannot share the {num_heads} KV heads of {target}"
        yield Check("--tensor-parallel-size", "fail", found, f"give at most {num_heads}")


def _of_target(draft: Path, target: Path) -> Iterator[Check]:
    """Fails for a head of another target; silent about others, and about files that another check reports."""
    try:
        config, model = _read_object(draft / "config.json"), _read_object(target / "config.json")
        why = mismatch(config, model) if is_draft_head(draft) else ""
    except (Damaged, ConfigError):
        return
    if why:
        of = target_name(config)
        found = f"{draft} is a head of {of or 'another target'}: {why}"
        yield Check("draft", "fail", found, f"give a head that was trained for {target}")


def _files(folder: Path, option: str) -> Check:
    name = f"files of {folder.name or folder}"
    try:
        config = _read_object(folder / "config.json")
        num_bytes = _weights(folder)
    except Damaged as error:
        return Check(name, "fail", str(error), f"download the checkpoint again, or give {option}")
    architectures = ", ".join(config.get("architectures") or []) or "no architecture named"
    return Check(name, "ok", f"{architectures}, {num_bytes / 2**20:.0f} MiB of weights")


def weights_of(folder: Path) -> list[Path]:
    """Returns the weight files of a folder. Raises ConfigError: it has none."""
    return linked_parts(folder) or weight_files(folder)


def _weights(folder: Path) -> int:
    """Checks the weight files and returns their bytes. Raises Damaged."""
    try:
        files = weights_of(folder)
    except ConfigError as error:
        raise Damaged(f"{folder}: {error.message}") from None
    return sum(_shard(file) if file.suffix == ".safetensors" else _other(file) for file in files)


def _other(path: Path) -> int:
    """Size in bytes. Raises Damaged when it is neither archive nor pickle, as after an aborted download."""
    try:
        with path.open("rb") as file:
            is_pickle = file.read(1) == b"\x80"
        if path.suffix in (".bin", ".pt") and not is_pickle and not zipfile.is_zipfile(path):
            raise Damaged(f"{path} is truncated, or not a file of PyTorch's")
        return path.stat().st_size
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from None


def _shard(path: Path) -> int:
    """Size in bytes. Raises Damaged when the file is shorter than its header says, as after an aborted download."""
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_len = int.from_bytes(file.read(_HEADER_LEN_BYTES), "little")
            if header_len > _LONGEST_HEADER_BYTES:
                raise Damaged(f"{path} is not a safetensors file")
            header = json.loads(file.read(header_len))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(f"{path} is not a safetensors file") from None
    wanted = _HEADER_LEN_BYTES + header_len + max(ends, default=0)
    if num_bytes < wanted:
        raise Damaged(f"{path} is truncated: {num_bytes} of {wanted} bytes")
    return num_bytes


def _tokenizers(target: Path, draft: Path) -> Check:
    name = f"tokenizer of {draft.name}"
    try:
        same = _vocabulary(target) == _vocabulary(draft)
    except Damaged as error:
        return Check(name, "fail", str(error), "download the checkpoint again")
    if same:
        return Check(name, "ok", "the target's")
    advice = "nothing to do; a draft model with the target's tokenizer is faster and accepted more often"
    return Check(name, "warn", "vocabulary differs from the target's: drafts are translated", advice)


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
        raise Damaged(f"{path} is not a JSON object")
    return value
