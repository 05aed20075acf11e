"""A target checkpoint's input embedding and output head, without the rest.

EAGLE heads embed tokens as the target does; EAGLE-1 and some Medusa heads use its output head. Not here: the target
itself (engine.model.load).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from outrider.drafting.checkpoints.config_fields import MAX_SIZE, read_json_object
from outrider.drafting.checkpoints.errors import CheckpointRefused, refusing
from outrider.drafting.checkpoints.tensor_table import TensorTable
from outrider.drafting.heads.frozen import embeds_plainly
from outrider.engine.model.guards import read_config

# Name endings: llama, mistral, mixtral, qwen, phi, opt, gemma; gpt2; gpt_neox; falcon, bloom; nemotron_h.
EMBEDDING_SUFFIXES = (
    *("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight"),
    "backbone.embeddings.weight",
)
LM_HEAD_SUFFIXES = ("lm_head.weight", "embed_out.weight")
# The number of a decoder layer in a tensor's name; numbers from num_hidden_layers on are layers for multi-token
# prediction with copies of the embedding and the head (DeepSeek-V3, GLM-4.5).
_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Settings that change logits after lm_head; name -> the neutral value.
_LOGIT_SETTINGS = {"logits_scaling": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None}


@dataclass(frozen=True)
class TargetWeights:
    """A target's embedding and lm_head: [vocab_size, hidden_size] each; the same tensor if they are tied.

    read_lm_head: None if they are tied. model: the loaded target, whose modules heads use; None: not in this process.
    """

    path: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    read_embedding: Callable[[], torch.Tensor]
    read_lm_head: Callable[[], torch.Tensor] | None
    lm_head_extra: str | None  # what changes logits after lm_head; None for most architectures
    tokenizer_size: int | None
    model: Any = None

    @cached_property
    def embedding(self) -> torch.Tensor:
        return self.read_embedding()

    @cached_property
    def lm_head(self) -> torch.Tensor:
        return self.embedding if self.read_lm_head is None else self.read_lm_head()

    def frozen_embedding(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns what a head freezes; without numbers, on the meta device, where `use_targets` will replace it."""
        return self.embedding.to(dtype) if self.model is None or not embeds_plainly(self.model) else self._empty(dtype)

    def frozen_lm_head(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns what a head freezes; as `frozen_embedding`."""
        return self.lm_head.to(dtype) if self.model is None else self._empty(dtype)

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((self.vocab_size, self.hidden_size), dtype=dtype, device="meta")

    def require_plain_lm_head(self, path: str | Path) -> None:
        """Raises CheckpointRefused for a head that uses lm_head if the target changes its logits afterwards."""
        if self.lm_head_extra is not None:
            cause = f"the head ends in the target's own lm_head, but {self.path} applies {self.lm_head_extra} after it"
            raise CheckpointRefused(path, cause, "use a kind of head with its own lm_head")

    def require_same_tokenizer(self, folder: Path) -> None:
        """Raises CheckpointRefused if the head's tokenizer differs in size from the target's."""
        found = _tokenizer_size(folder)
        if found is not None and self.tokenizer_size is not None and found != self.tokenizer_size:
            cause = f"tokenizer.json has {found} tokens, the target's has {self.tokenizer_size}"
            raise CheckpointRefused(folder, cause, "use a head trained for this target")


def load_target_weights(path: str | Path, dtype: torch.dtype | None = None, model: Any = None) -> TargetWeights:
    """Reads both matrices as `dtype`; None: as stored. model: the loaded target; they are then read when they are used.

    Raises CheckpointRefused if they have no known name, or not the config's shape.
    """
    folder = Path(path)
    table = TensorTable.read(folder)
    with refusing(folder, "reading its config"):
        whole = read_config(str(folder))
    config = whole.get_text_config()
    vocab_size = _size(folder, config, "vocab_size")
    hidden_size = _size(folder, config, "hidden_size")
    num_layers = _size(folder, config, "num_hidden_layers")
    wanted = (vocab_size, hidden_size)
    name = _find(table, EMBEDDING_SUFFIXES, num_layers)
    if name is None:
        raise _not_found(table, "input embedding", EMBEDDING_SUFFIXES)
    read_embedding, read_lm_head = _reader(table, name, wanted, dtype), None
    extra = _lm_head_extra(config)
    name = _find(table, LM_HEAD_SUFFIXES, num_layers)
    # As engine/model/text_part: a wrapper may tie them in either config, and have a head all the same.
    is_tied = any(getattr(part, "tie_word_embeddings", False) for part in (whole, config))
    if not is_tied or (name is not None and whole is not config):
        if name is None:
            raise _not_found(table, "output head (its config ties no embeddings)", LM_HEAD_SUFFIXES)
        read_lm_head = _reader(table, name, wanted, dtype)
        bias = name.removesuffix("weight") + "bias"
        extra = f"a bias ({bias})" if bias in table else extra
    weights = TargetWeights(
        path=str(path),
        architecture=_architecture(config),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        read_embedding=read_embedding,
        read_lm_head=read_lm_head,
        lm_head_extra=extra,
        tokenizer_size=_tokenizer_size(folder),
        model=model,
    )
    if model is None:
        _ = weights.embedding, weights.lm_head
    return weights


def _find(table: TensorTable, suffixes: tuple[str, ...], num_layers: int) -> str | None:
    names = [
        name
        for name in table.tensors
        if any(name == last or name.endswith("." + last) for last in suffixes)
        and not _is_of_multi_token_prediction(name, num_layers)
    ]
    if len(names) > 1:
        raise CheckpointRefused(table.folder, f"several tensors match: {', '.join(sorted(names)[:8])}")
    return names[0] if names else None


def _is_of_multi_token_prediction(name: str, num_layers: int) -> bool:
    """Returns whether a tensor is for multi-token prediction: in a layer beyond the model's, or "mtp" (Qwen3-Next)."""
    number = _LAYER_NUMBER.search(name)
    return "mtp" in name.split(".") or (number is not None and int(number.group(1)) >= num_layers)


def _not_found(table: TensorTable, what: str, suffixes: tuple[str, ...]) -> CheckpointRefused:
    looked_for = ", ".join(f"*{suffix}" for suffix in suffixes)
    return CheckpointRefused(table.folder, f"no {what}: looked for {looked_for} among {table.summary()}")


def _reader(
    table: TensorTable, name: str, wanted: tuple[int, int], dtype: torch.dtype | None
) -> Callable[[], torch.Tensor]:
    if table.shape(name) != wanted:
        cause = f"tensor {name} has shape {list(table.shape(name))}, the config says {list(wanted)}"
        raise CheckpointRefused(table.folder, cause)
    return lambda: table.floats(name, dtype)


def _size(folder: Path, config: Any, name: str) -> int:
    found = getattr(config, name, None)
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= MAX_SIZE:
        raise CheckpointRefused(folder, f"its config's {name} is {found!r}, not a whole number from 1 to {MAX_SIZE}")
    return found


def _architecture(config: Any) -> str:
    named = getattr(config, "architectures", None)
    return str(named[0]) if isinstance(named, list) and named else type(config).__name__


def _lm_head_extra(config: Any) -> str | None:
    for name, neutral in _LOGIT_SETTINGS.items():
        found = getattr(config, name, None)
        if found is not None and found != neutral:
            return f"{name}={found}"
    return None


def _tokenizer_size(folder: Path) -> int | None:
    """Returns the largest token id of folder/tokenizer.json plus 1; None without a file or ids.

    Raises CheckpointRefused if it is not a JSON object.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    content = read_json_object(file)
    token_ids: list[Any] = []
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        token_ids.extend(vocab.values())
    elif isinstance(vocab, list):  # Unigram: [piece, score] in the order of the ids
        token_ids.append(len(vocab) - 1)
    added = content.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict):
            token_ids.append(entry.get("id"))
    known = [token_id for token_id in token_ids if isinstance(token_id, int)]
    return max(known) + 1 if known else None
