"""Draft methods over trained heads: the checkpoint, what they use of the target's, and the net they draft with.

Not here: the formats (drafter_service/checkpoints), the heads (drafter_service/heads) and the nets (beside this).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafter_service.checkpoints.eagle import load_eagle
from drafter_service.checkpoints.eagle3 import load_eagle3
from drafter_service.checkpoints.medusa import load_medusa
from drafter_service.checkpoints.mlp_speculator import load_mlp_speculator
from drafter_service.checkpoints.target_weights import TargetWeights, load_target_weights
from drafter_service.config import DrafterConfig
from drafter_service.methods.eagle import EagleNet
from drafter_service.methods.growing import GrowingMethod
from drafter_service.methods.head_forward import HeadForward
from drafter_service.methods.interface import DraftMethod
from drafter_service.methods.medusa import MedusaNet
from drafter_service.methods.mlp_speculator import MlpSpeculatorNet
from drafter_service.methods.paged_head import PagedHead
from drafter_service.methods.target_vocabulary import TargetVocabulary
from engine.attention import AttentionOps, resolve_attention_ops
from engine.grammar import GrammarCompiler
from engine.model_guards import read_config, read_eos_token_ids, resolve_dtype
from engine.row_invariance import make_row_invariant
from shared.messages import DraftMethodInfo

# EAGLE heads go on from their own features; further than this they only guess at their own guesses.
MAX_EAGLE_DEPTH = 12


@dataclass(frozen=True)
class _Built:
    """A net, the target layers it reads, and how many tokens ahead it can look."""

    net: EagleNet | MedusaNet | MlpSpeculatorNet
    hidden_layers: tuple[int, ...]
    takes_hidden_history: bool
    max_depth: int
    max_model_len: int = 0


def build_head_method(kind: str, path: str, config: DrafterConfig, *, num_threads: int) -> DraftMethod:
    """Raises CheckpointRefused (a ConfigError) when head and target do not fit together."""
    torch.set_num_threads(num_threads)
    target_config = read_config(config.target_model)
    dtype = resolve_dtype(config.target_model, target_config, config.dtype)
    target = load_target_weights(config.target_model, dtype)
    built = _BUILDERS[kind](path, target, dtype, config)
    info = DraftMethodInfo(
        name=kind,
        model=Path(path).name,
        hidden_layers=built.hidden_layers,
        max_num_draft_tokens=built.max_depth,
        proposes_trees=True,
        max_model_len=built.max_model_len,
        vocab_size=target.vocab_size,
        takes_hidden_history=built.takes_hidden_history,
        hidden_size=target.hidden_size,
    )
    eos_token_ids = read_eos_token_ids(config.target_model, target_config)
    grammars = GrammarCompiler(config.target_model, target.vocab_size, eos_token_ids)
    draw_chains = built.net.draw_chains if _draws_on_device(config) else None
    return GrowingMethod(built.net, info, eos_token_ids=eos_token_ids, grammars=grammars, draw_chains=draw_chains)


def _medusa(path: str, target: TargetWeights, dtype: torch.dtype, config: DrafterConfig) -> _Built:
    heads = load_medusa(path, target, dtype).to(config.device)
    vocabulary = TargetVocabulary(target.vocab_size, heads.token_map)
    num_heads = heads.config.num_heads
    make_row_invariant(heads, _ops(config).row_backend)
    return _Built(MedusaNet(heads, vocabulary, dtype, config.device), (target.num_layers,), False, num_heads)


def _mlp_speculator(path: str, target: TargetWeights, dtype: torch.dtype, config: DrafterConfig) -> _Built:
    speculator = load_mlp_speculator(path, target, dtype).to(config.device)
    vocabulary = TargetVocabulary(target.vocab_size, None)
    n_predict = speculator.config.n_predict
    make_row_invariant(speculator, _ops(config).row_backend)
    net = MlpSpeculatorNet(speculator, vocabulary, dtype, config.device)
    return _Built(net, (target.num_layers,), False, n_predict)


def _eagle(path: str, target: TargetWeights, dtype: torch.dtype, config: DrafterConfig) -> _Built:
    return _eagle_net(load_eagle(path, target, dtype), target, dtype, config)


def _eagle3(path: str, target: TargetWeights, dtype: torch.dtype, config: DrafterConfig) -> _Built:
    return _eagle_net(load_eagle3(path, target, dtype), target, dtype, config)


def _eagle_net(head: Any, target: TargetWeights, dtype: torch.dtype, config: DrafterConfig) -> _Built:
    vocabulary = TargetVocabulary(target.vocab_size, head.target_ids)
    paged = PagedHead(
        head,
        _ops(config),
        dtype,
        kv_cache_bytes=config.kv_cache_mb * 2**20,
        block_size=config.block_size,
        device=config.device,
        graphs=not config.enforce_eager,
    )
    chains = None
    if _draws_on_device(config):
        from engine.device_chains import DeviceChains  # triton is there on machines with a GPU

        chains = DeviceChains(HeadForward(paged, vocabulary, graphs=not config.enforce_eager))
    net = EagleNet(paged, vocabulary, prefill_chunk_size=config.prefill_chunk_size, chains=chains)
    return _Built(net, net.hidden_layers, True, MAX_EAGLE_DEPTH)


def _draws_on_device(config: DrafterConfig) -> bool:
    return _ops(config).row_backend == "triton"


def _ops(config: DrafterConfig) -> AttentionOps:
    return resolve_attention_ops(config.attention_backend, torch.device(config.device))


_BUILDERS = {"medusa": _medusa, "mlp_speculator": _mlp_speculator, "eagle": _eagle, "eagle3": _eagle3}
