"""Puts our indexer in the place of transformers' in a sparse attention, where it is proved to choose the same keys.

transformers' module scores all keys of a padded batch; ours caches its keys in pages and chooses row by row
(attention/choice). Its projections and norm stay transformers'. Of the classes that are known, keys and queries are
rotated in pairs or in halves: the proof at load decides, and refuses a module that does neither.
Not here: the attention over what was chosen (attention/layer).
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.engine.attention.choice import INDEX_DIM, Choice
from outrider.engine.attention.layer import IndexerCall
from outrider.engine.attention.ops import AttentionOps
from outrider.engine.errors import ModelRefused
from outrider.engine.model.lean import lean_check

# elements; least width of a key that the CPU kernel loads
_MIN_KEY_DIM = 16
# rows of the proof, and keys that each chooses: few enough that none ties at 0 (weights and inputs are positive)
_NUM_ROWS, _NUM_CHOSEN = 48, 7
# Model types whose indexers are replaced by ours.
INDEXED = frozenset({"deepseek_v32", "dots3_note_text", "glm_moe_dsa"})
_LEAST_SIZES = {"index_topk": 1, "index_n_heads": 1, "index_head_dim": _MIN_KEY_DIM}


class SparseIndexer(torch.nn.Module):
    """Replaces transformers' indexer: H heads score one key of D elements per token, of which R are rotated."""

    def __init__(self, original: Any, *, in_pairs: bool) -> None:
        super().__init__()
        self.num_heads, self.key_dim = int(original.n_heads), int(original.head_dim)
        self.rotated_dim, self.num_chosen = int(original.qk_rope_head_dim), int(original.index_topk)
        self.in_pairs = in_pairs
        self.factor = float(original.softmax_scale) * self.num_heads**-0.5
        self.wq_b, self.wk, self.k_norm = original.wq_b, original.wk, original.k_norm
        self.weights_proj = original.weights_proj
        # transformers may keep this one projection in fp32.
        self._weights_dtype = _dtype_of(original.weights_proj)

    def forward(
        self,
        hidden_states: torch.Tensor,
        query_latent: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        call: IndexerCall,
        position_ids: torch.Tensor | None = None,
        past_key_values: object = None,
    ) -> Choice:
        """Chooses for the rows hidden_states [1, T, hidden], query_latent [1, T, Q]; others as transformers' module."""
        query, weights, key = self.project(hidden_states, query_latent, position_embeddings)
        return call.choose(query, weights, key, self.num_chosen)

    def project(
        self, hidden_states: torch.Tensor, query_latent: torch.Tensor, position_embeddings: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (query fp32 [T, H, D], weights fp32 [T, H], key [T, D])."""
        cos, sin = (part[0, :, None, : self.rotated_dim // 2] for part in position_embeddings)
        query = self.wq_b(query_latent)[0].unflatten(-1, (self.num_heads, self.key_dim))
        key = self.k_norm(self.wk(hidden_states))[0, :, None]
        # A row-invariant linear shows no weight, and a proof's copy has another dtype.
        dtype = _dtype_of(self.weights_proj) or self._weights_dtype
        rows = hidden_states if dtype is None else hidden_states.to(dtype)
        weights = self.weights_proj(rows)[0].float() * self.factor
        return self._rotate(query, cos, sin).float(), weights, self._rotate(key, cos, sin)[:, 0]

    def _rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates the first R elements of heads [T, H, D]."""
        half = self.rotated_dim // 2
        rotated = heads[..., : self.rotated_dim]
        pairs, halves = (rotated[..., 0::2], rotated[..., 1::2]), (rotated[..., :half], rotated[..., half:])
        left, right = pairs if self.in_pairs else halves
        turned = (left * cos - right * sin, right * cos + left * sin)
        return torch.cat((*turned, heads[..., self.rotated_dim :]), dim=-1)


def _dtype_of(linear: torch.nn.Module) -> torch.dtype | None:
    """Returns the dtype of a plain linear's weight; None for a packed one, which takes the model's."""
    weight = linear._parameters.get("weight")
    return None if weight is None else weight.dtype


def require_sizes(path: str, config: Any) -> None:
    """Refuses an indexer's sizes that nothing can be chosen with. config: of the text model."""
    if config.model_type not in INDEXED:
        return
    for name, least in _LEAST_SIZES.items():
        value = getattr(config, name, None)
        if not isinstance(value, int) or value < least:
            raise ModelRefused(path, f"{name} of its config.json is {value}; it must be at least {least}")
    kinds, num_layers = getattr(config, "indexer_types", None), config.num_hidden_layers
    if kinds is not None and len(kinds) != num_layers:
        raise ModelRefused(path, f"indexer_types of its config.json lists {len(kinds)} of {num_layers} layers")
    rotated, key_dim = getattr(config, "qk_rope_head_dim", None), config.index_head_dim
    if not isinstance(rotated, int) or not 0 < rotated <= key_dim or rotated % 2:
        cause = f"qk_rope_head_dim of its config.json is {rotated}, and index_head_dim {key_dim}"
        raise ModelRefused(path, f"{cause}; the first must be even, positive and no larger")


@torch.inference_mode()
def adapt_indexers(path: str, model: Any, ops: AttentionOps) -> int:
    """Replaces the indexers of all attention modules in place; returns their number.

    Must run before anything else that replaces modules. Raises ModelRefused if they are not what we know.
    """
    attentions = [(name, module) for name, module in model.named_modules() if hasattr(module, "indexer")]
    known: dict[Any, bool] = {}  # signature -> whether keys are rotated in pairs
    num_replaced = 0
    for name, attention in attentions:
        attention.register_forward_pre_hook(_pass_call, with_kwargs=True)
        original = attention.indexer
        if original is None:  # it attends what a layer before it has chosen, or has a window
            continue
        if ops.index_scores is None:
            cause = f"{name} chooses which tokens each token attends (sparse attention), which no GPU kernel computes"
            raise ModelRefused(path, cause, "set device=cpu")
        signature = lean_check.signature(original)
        try:
            if signature not in known:
                known[signature] = _finds_rotation(original, ops)
            attention.indexer = SparseIndexer(original, in_pairs=known[signature])
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ModelRefused(path, f"{type(original).__name__} is not the indexer that is known: {error}") from error
        setattr(attention, INDEX_DIM, attention.indexer.key_dim)
        num_replaced += 1
    return num_replaced


def _pass_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gives an attention module, in place of a mask, what its indexer needs."""
    return args, kwargs | {"attention_mask": IndexerCall(kwargs["paged"], int(module.layer_idx))}


def _finds_rotation(original: Any, ops: AttentionOps) -> bool:
    """Returns whether keys are rotated in pairs. Raises ValueError if either way other keys are chosen."""
    wide: Any = lean_check.wide_copy(original)
    wide.index_topk = _NUM_CHOSEN
    wide.weights_proj.weight.copy_(wide.weights_proj.weight.abs())
    device = wide.weights_proj.weight.device
    generator = torch.Generator().manual_seed(13)

    def rows(width: int) -> torch.Tensor:
        return torch.randn((1, _NUM_ROWS, width), generator=generator).to(device)

    hidden, latent = rows(wide.wk.in_features).abs(), rows(wide.wq_b.in_features)
    angles = rows(int(wide.qk_rope_head_dim) // 2).repeat(1, 1, 2)
    embeddings = angles.cos(), angles.sin()
    mask = torch.zeros((1, _NUM_ROWS, _NUM_ROWS), device=device)  # in the proof every row sees all
    theirs = wide(hidden, latent, embeddings, mask, None, past_key_values=None)[0].sort().values
    slots = torch.arange(_NUM_ROWS, dtype=torch.int32, device=device).expand(_NUM_ROWS, -1)
    for in_pairs in (True, False):
        query, weights, key = SparseIndexer(wide, in_pairs=in_pairs).project(hidden, latent, embeddings)
        scores = ops.index_scores(query, weights, key, slots)  # type: ignore[misc]
        if torch.equal(scores.topk(_NUM_CHOSEN).indices.sort().values, theirs):
            return in_pairs
    raise ValueError("it chooses other keys than ours")
