"""Puts our indexer in the place of transformers' in a sparse attention, where it is proved to choose the same keys.

transformers' module scores all keys of a padded batch; ours caches its keys in pages and chooses row by row
(attention/choice). Its projections and norms stay transformers'. DeepSeek's chooses keys; of its classes, keys and
queries are rotated in pairs or in halves: the proof at load decides, and refuses a module that does neither.
MiniMax-M3's chooses blocks of keys. Not here: the attention over what was chosen (attention/layer).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from outrider.engine.attention.choice import INDEX_DIM, Choice, TopBlocks, TopKeys
from outrider.engine.attention.layer import IndexerCall, UnsupportedAttention
from outrider.engine.attention.ops import AttentionOps
from outrider.engine.errors import ModelRefused
from outrider.engine.model.lean import lean_check

# elements; least width of a key that the CPU kernel loads
_MIN_KEY_DIM = 16
# rows of the proof, and keys that each chooses: few enough that none ties at 0 (weights and inputs are positive)
_NUM_ROWS, _NUM_CHOSEN = 48, 7
_BLOCKS = TopBlocks(block_size=4, num_blocks=4, num_local=2)
# Model types whose indexers are replaced by ours -> the type of their layers, and least sizes.
INDEXED = {
    **dict.fromkeys(("deepseek_v32", "dots3_note_text", "glm_moe_dsa"), "indexed_attention"),
    "minimax_m3_vl_text": "minimax_m3_sparse",
}
_LEAST_SIZES = {
    "indexed_attention": {"index_topk": 1},
    "minimax_m3_sparse": {"index_topk_blocks": 1, "index_block_size": 1, "index_local_blocks": 0},
}


class SparseIndexer(torch.nn.Module):
    """Replaces transformers' indexer: H heads score one key of D elements per token, of which R are rotated."""

    def __init__(self, original: Any, *, in_pairs: bool) -> None:
        super().__init__()
        self.num_heads, self.key_dim = int(original.n_heads), int(original.head_dim)
        self.rotated_dim, self.rule = int(original.qk_rope_head_dim), TopKeys(int(original.index_topk))
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
        return call.choose(query[:, None], weights[:, None], key, self.rule)

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
        query, key = (_rotated(heads, cos, sin, in_pairs=self.in_pairs) for heads in (query, key))
        return query.float(), weights, key[:, 0]


class BlockIndexer(torch.nn.Module):
    """Replaces MiniMax-M3's indexer: each of C heads chooses blocks by the products with one key of D elements."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.num_choices, self.key_dim = int(original.num_heads), int(original.head_dim)
        self.rule = TopBlocks(int(original.block_size), int(original.topk_blocks), int(original.local_blocks))
        self.q_proj, self.k_proj = original.q_proj, original.k_proj
        self.q_norm, self.k_norm = original.q_norm, original.k_norm

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        call: IndexerCall,
        position_ids: torch.Tensor | None = None,
    ) -> Choice:
        """Chooses for the rows hidden_states [1, T, hidden]; others as transformers' module."""
        return call.choose(*self.project(hidden_states, position_embeddings), self.rule)

    def project(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (query fp32 [T, C, 2, D], weights fp32 [T, C, 2], key [T, D]) whose scores are the products."""
        cos, sin = (part[0, :, None, : part.shape[-1] // 2] for part in position_embeddings)
        if 2 * cos.shape[-1] > self.key_dim:
            raise UnsupportedAttention(f"an indexer rotates {2 * cos.shape[-1]} elements of keys of {self.key_dim}")
        query = self.q_norm(self.q_proj(hidden_states)[0].unflatten(-1, (self.num_choices, self.key_dim)))
        key = self.k_norm(self.k_proj(hidden_states)[0, :, None])
        query, key = (_rotated(heads, cos, sin, in_pairs=False) for heads in (query, key))
        # max(x, 0) - max(-x, 0) is x, to the bit.
        query = torch.stack((query, -query), dim=2).float()
        return query, query.new_tensor((1.0, -1.0)).repeat(*query.shape[:2], 1), key[:, 0]


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, in_pairs: bool) -> torch.Tensor:
    """Rotates the first R elements of heads [T, H, D]; cos, sin: [T, 1, R / 2]."""
    half = cos.shape[-1]
    rotated = heads[..., : 2 * half]
    pairs, halves = (rotated[..., 0::2], rotated[..., 1::2]), (rotated[..., :half], rotated[..., half:])
    left, right = pairs if in_pairs else halves
    return torch.cat((left * cos - right * sin, right * cos + left * sin, heads[..., 2 * half :]), dim=-1)


def _dtype_of(linear: torch.nn.Module) -> torch.dtype | None:
    """Returns the dtype of a plain linear's weight; None for a packed one, which takes the model's."""
    weight = linear._parameters.get("weight")
    return None if weight is None else weight.dtype


def require_sizes(path: str, config: Any) -> None:
    """Refuses an indexer's sizes that nothing can be chosen with. config: of the text model."""
    kind = INDEXED.get(config.model_type)
    if kind is None or kind not in (getattr(config, "layer_types", None) or (kind,)):
        return
    sizes = {"index_n_heads": 1, "index_head_dim": _MIN_KEY_DIM}
    for name, least in (_LEAST_SIZES[kind] | sizes).items():
        value = getattr(config, name, None)
        if not isinstance(value, int) or value < least:
            raise ModelRefused(path, f"{name} of its config.json is {value}; it must be at least {least}")
    kinds, num_layers = getattr(config, "indexer_types", None), config.num_hidden_layers
    if kinds is not None and len(kinds) != num_layers:
        raise ModelRefused(path, f"indexer_types of its config.json lists {len(kinds)} of {num_layers} layers")
    if kind == "minimax_m3_sparse":
        _require_block_sizes(path, config)
        return
    rotated, key_dim = getattr(config, "qk_rope_head_dim", None), config.index_head_dim
    if not isinstance(rotated, int) or not 0 < rotated <= key_dim or rotated % 2:
        cause = f"qk_rope_head_dim of its config.json is {rotated}, and index_head_dim {key_dim}"
        raise ModelRefused(path, f"{cause}; the first must be even, positive and no larger")


def _require_block_sizes(path: str, config: Any) -> None:
    choices, heads = config.index_n_heads, config.num_key_value_heads
    if heads % choices:
        cause = f"index_n_heads of its config.json is {choices}, which does not divide {heads} key/value heads"
        raise ModelRefused(path, cause)


@torch.inference_mode()
def adapt_indexers(path: str, model: Any, ops: AttentionOps) -> int:
    """Replaces the indexers of all attention modules in place; returns their number.

    Must run before anything else that replaces modules. Raises ModelRefused if they are not what we know.
    """
    attentions = [(name, module) for name, module in model.named_modules() if hasattr(module, "indexer")]
    known: dict[Any, Callable[[Any], Any]] = {}  # signature -> what makes its replacement
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
                known[signature] = _replacement(original, ops)
            attention.indexer = known[signature](original)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ModelRefused(path, f"{type(original).__name__} is not the indexer that is known: {error}") from error
        setattr(attention, INDEX_DIM, attention.indexer.key_dim)
        num_replaced += 1
    return num_replaced


def _pass_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gives an attention module, in place of a mask, what its indexer needs."""
    call = IndexerCall(kwargs["paged"], int(module.layer_idx))
    return args, kwargs | {"attention_mask": call, "past_key_values": call}


def _replacement(original: Any, ops: AttentionOps) -> Callable[[Any], Any]:
    """Returns what makes the module's replacement. Raises ValueError if none chooses the same keys."""
    wide: Any = lean_check.wide_copy(original)
    if hasattr(wide, "topk_blocks"):
        _require_same_blocks(wide, ops)
        return BlockIndexer
    return partial(SparseIndexer, in_pairs=_finds_rotation(wide, ops))


def _proof_rows(generator: torch.Generator, width: int, device: torch.device) -> torch.Tensor:
    return torch.randn((1, _NUM_ROWS, width), generator=generator).to(device)


def _require_same_blocks(wide: Any, ops: AttentionOps) -> None:
    """Raises ValueError if other blocks of keys are chosen than by MiniMax-M3's indexer."""
    wide.block_size, wide.topk_blocks, wide.local_blocks = _BLOCKS.block_size, _BLOCKS.num_blocks, _BLOCKS.num_local
    device, generator = wide.k_proj.weight.device, torch.Generator().manual_seed(13)
    hidden = _proof_rows(generator, wide.k_proj.in_features, device)
    angles = _proof_rows(generator, int(wide.head_dim) // 4, device).repeat(1, 1, 2)
    embeddings = angles.cos(), angles.sin()
    rows = torch.arange(_NUM_ROWS, dtype=torch.int32, device=device)
    theirs = wide(hidden, embeddings, None, rows[None])[0]  # [C, T, blocks], -1 in the place of a missing one
    ours = BlockIndexer(wide)
    query, weights, key = ours.project(hidden, embeddings)
    slots = torch.where(rows <= rows[:, None], rows, -1).repeat_interleave(ours.num_choices, 0)
    scores = ops.index_scores(query.flatten(0, 1), weights.flatten(0, 1), key, slots)  # type: ignore[misc]
    chosen = ours.rule.chosen(scores, slots).reshape(_NUM_ROWS, ours.num_choices, -1, ours.rule.block_size)
    expected = torch.nn.functional.one_hot(theirs + 1, _NUM_ROWS // ours.rule.block_size + 1).sum(2)[..., 1:]
    if not torch.equal(chosen.any(3), expected.transpose(0, 1) > 0):
        raise ValueError("it chooses other blocks of keys than ours")


def _finds_rotation(wide: Any, ops: AttentionOps) -> bool:
    """Returns whether keys are rotated in pairs. Raises ValueError if either way other keys are chosen."""
    wide.index_topk = _NUM_CHOSEN
    wide.weights_proj.weight.copy_(wide.weights_proj.weight.abs())
    device = wide.weights_proj.weight.device
    rows = partial(_proof_rows, torch.Generator().manual_seed(13), device=device)
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
