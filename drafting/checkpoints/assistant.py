"""Loads Gemma 4's assistant, as its authors publish it, with what it reads of the target.

Not here: the head (drafting.heads.assistant), recognising the folder (recognise.py).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel

from outrider.drafting.checkpoints.errors import CheckpointRefused, refusing
from outrider.drafting.checkpoints.fill_module import build_on_meta, fill, require_ids
from outrider.drafting.checkpoints.target_weights import load_target_weights
from outrider.drafting.checkpoints.tensor_table import TensorTable
from outrider.drafting.heads.assistant import AssistantConfig, AssistantHead
from outrider.engine.attention.layer import ATTENTION_NAME, register_attention
from outrider.engine.errors import ModelRefused
from outrider.engine.model.guards import read_config
from outrider.engine.model.text_part import text_tensors
from outrider.engine.model.weights import lazy_tensors

_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ORDERING = "masked_embedding.token_ordering"


def load_assistant(
    path: str | Path,
    target: str | Path,
    dtype: torch.dtype,
    *,
    embedding: nn.Module | None = None,
    attn_implementation: str = ATTENTION_NAME,
) -> AssistantHead:
    """Loads an assistant for the target in another folder, on the CPU in eval mode.

    embedding: the loaded target's input embedding; None: it is read from the target's folder. Raises CheckpointRefused
    if the two do not fit, or a tensor is missing, unexpected or misshapen.
    """
    folder = Path(path)
    table = TensorTable.read(folder)
    config, ties_embedding = _config(folder, Path(target))
    ordering = None
    if config.num_centroids:
        if _ORDERING not in table:
            raise CheckpointRefused(folder, f"tensor {_ORDERING} is missing; there are {table.summary()}")
        ordering = table.integers(_ORDERING).flatten()
        if len(ordering) != config.layers.vocab_size:
            cause = f"tensor {_ORDERING} has {len(ordering)} tokens, its config says {config.layers.vocab_size}"
            raise CheckpointRefused(folder, cause)
        require_ids(table, _ORDERING, ordering, config.layers.vocab_size)
    head, scaled = _outline(table, config, attn_implementation)
    fill(
        head,
        table,
        dtype,
        sources={
            "output.weight": _EMBEDDING if ties_embedding else _LM_HEAD,
            "centroids.weight": "masked_embedding.centroids.weight",
        },
        given=_target_tensors(head, Path(target), dtype),
        ignored=(_ORDERING, _EMBEDDING, _LM_HEAD),
    )
    if ordering is not None:
        head.token_ordering = ordering
    if embedding is None:
        scaled.weight = nn.Parameter(load_target_weights(target, dtype).embedding)
        embedding = scaled
    head.embed_tokens = embedding
    return head.eval().requires_grad_(False)


def _config(folder: Path, target: Path) -> tuple[AssistantConfig, bool]:
    """Returns the config, and whether the output head is the assistant's own embedding."""
    with refusing(folder, "reading its config"):
        given: Any = read_config(str(folder))
        layers = copy.deepcopy(given.get_text_config())
        # All share the target's, which transformers' text model takes for a mistake; the head says it to each layer.
        layers.num_kv_shared_layers = 0
        # transformers lets an assistant attend to one position more than the target's layers do.
        layers.sliding_window += 1
        decoder: Any = read_config(str(target)).get_text_config()
        if given.backbone_hidden_size != decoder.hidden_size:
            sizes = f"backbone_hidden_size is {given.backbone_hidden_size}, the target's width is {decoder.hidden_size}"
            raise CheckpointRefused(folder, sizes, "use the assistant of this target")
        num_centroids = given.num_centroids if given.use_ordered_embeddings else 0
        config = AssistantConfig(decoder, layers, num_centroids, given.centroid_intermediate_top_k)
    return config, bool(given.tie_word_embeddings)


def _outline(table: TensorTable, config: AssistantConfig, attn_implementation: str) -> tuple[AssistantHead, Any]:
    """Returns the head on the meta device, and the target's scaled embedding without its weight."""

    register_attention()

    def text_model(of: Any) -> Any:
        made = AutoModel.from_config(of, attn_implementation=attn_implementation)
        with torch.device("cpu"):  # its frequencies are in no file
            made.rotary_emb = type(made.rotary_emb)(of)
        return made

    with refusing(table.folder, "building the head"), torch.device("meta"):
        body, target_body = text_model(config.layers), text_model(config.decoder)
    scaled = target_body.embed_tokens
    scaled.embed_scale = torch.tensor(scaled.scalar_embed_scale)
    head = build_on_meta(table, lambda: AssistantHead(config, body, target_body, embedding=nn.Identity()))
    return head, scaled


def _target_tensors(head: AssistantHead, target: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Reads the head's `keys.*` from the target's folder."""
    refusals: list[ModelRefused] = []
    found = {}
    with refusing(target, "reading the layers whose keys its assistant attends to"):
        stored = text_tensors(lazy_tensors(str(target), refusals))
        for place, index in enumerate(head.config.sources.values()):
            for name in head.keys[place].state_dict():
                part, _, rest = name.partition(".")
                theirs = {"norm": "input_layernorm", "attention": "self_attn"}[part]
                source = f"model.layers.{index}.{theirs}.{rest}"
                if source not in stored:
                    raise CheckpointRefused(target, f"tensor {source} is missing")
                found[f"keys.{place}.{name}"] = stored[source][...].to(dtype)
    return found
