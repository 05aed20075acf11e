"""Draft methods over trained heads: the checkpoint, the target's weights that it uses, and its net.

Not here: the formats (drafting/checkpoints), the heads (drafting/heads) and the nets (in this folder).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.drafting.checkpoints.assistant import load_assistant
from outrider.drafting.checkpoints.block import load_block
from outrider.drafting.checkpoints.eagle import load_eagle
from outrider.drafting.checkpoints.eagle3 import load_eagle3
from outrider.drafting.checkpoints.medusa import load_medusa
from outrider.drafting.checkpoints.mlp_speculator import load_mlp_speculator
from outrider.drafting.checkpoints.mtp import load_mtp
from outrider.drafting.checkpoints.target_weights import TargetWeights, load_target_weights
from outrider.drafting.growth.draft import BEAM_WIDTH
from outrider.drafting.heads.assistant import AssistantHead
from outrider.drafting.heads.eagle3 import Eagle3Head
from outrider.drafting.methods.assistant import AssistantNet, PagedAssistant
from outrider.drafting.methods.block import BlockNet
from outrider.drafting.methods.eagle import EagleNet
from outrider.drafting.methods.growing import MAX_TREE_NODES, GrowingMethod
from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.medusa import MedusaNet
from outrider.drafting.methods.mlp_speculator import MlpSpeculatorNet
from outrider.drafting.methods.parallel_eagle import ParallelEagleNet
from outrider.drafting.paged.head_forward import HeadForward, recorded_chains
from outrider.drafting.paged.paged_block import BlockChains, PagedBlock
from outrider.drafting.paged.paged_head import PagedHead
from outrider.drafting.settings import MethodSettings
from outrider.drafting.vocabulary.target_vocabulary import TargetVocabulary
from outrider.engine.attention.ops import AttentionOps, resolve_attention_ops
from outrider.engine.model.end_of_text import read_eos_token_ids
from outrider.engine.model.guards import read_config, resolve_dtype
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.model.row_invariance import make_row_invariant
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.shared.messages import DraftMethodInfo

# tokens; deepest draft of EAGLE heads and MTP layers; beyond this depth they only continue from their own errors
MAX_EAGLE_DEPTH = 12


@dataclass(frozen=True)
class _Built:
    """A net, the target layers it reads, and the number of tokens that it predicts ahead.

    draws_chains: it can finish plain chains. is_one_pass: further tokens, and nodes of a tree, take no forward.
    """

    net: BlockNet | EagleNet | MedusaNet | MlpSpeculatorNet
    hidden_layers: tuple[int, ...]
    takes_hidden_history: bool
    max_depth: int
    max_model_len: int = 0
    draws_chains: bool = False
    is_one_pass: bool = False


def build_head_method(
    kind: str, path: str, settings: MethodSettings, *, num_threads: int, loaded: LoadedModel | None = None
) -> DraftMethod:
    """Builds a head's method. loaded: as in build_mtp_method.

    Raises CheckpointRefused (a ConfigError) when head and target do not match.
    """
    torch.set_num_threads(num_threads)
    target_config = read_config(settings.target_model)
    dtype = resolve_dtype(settings.target_model, target_config, settings.dtype)
    target = load_target_weights(settings.target_model, dtype, _whole(loaded))
    return _method(kind, path, _BUILDERS[kind](path, target, dtype, settings), settings, target_config)


def build_mtp_method(
    settings: MethodSettings, path: str | None, *, num_threads: int, loaded: LoadedModel | None
) -> DraftMethod:
    """Builds the method of the target's own MTP layer, or with a path of Gemma 4's assistant in that folder.

    loaded: the target, if it is in this process: the head then uses its embedding and output head. Raises
    CheckpointRefused when the target's folder has no MTP layer that can be read, or the assistant is another target's.
    """
    torch.set_num_threads(num_threads)
    target_config = read_config(settings.target_model)
    dtype = resolve_dtype(settings.target_model, target_config, settings.dtype)
    target = _whole(loaded)
    embedding = target.get_input_embeddings() if target is not None else None
    if path is not None:
        built = _assistant(load_assistant(path, settings.target_model, dtype, embedding=embedding), dtype, settings)
        return _method("mtp", path, built, settings, target_config)
    lm_head = target.get_output_embeddings() if target is not None else None
    head = load_mtp(settings.target_model, dtype, embedding=embedding, lm_head=lm_head)
    built = _feature_net(head, int(head.config.decoder.vocab_size), dtype, settings)
    return _method("mtp", settings.target_model, built, settings, target_config)


def _whole(loaded: LoadedModel | None) -> Any:
    """Returns the target's model; None where the process has no target, or a share of a tensor-parallel one."""
    return loaded.model if loaded is not None and loaded.leader is None else None


def _method(kind: str, path: str, built: _Built, settings: MethodSettings, target_config: Any) -> DraftMethod:
    target = target_config.get_text_config()
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
    eos_token_ids = read_eos_token_ids(settings.target_model, target_config)
    grammars = GrammarCompiler(settings.target_model, target.vocab_size, eos_token_ids)
    draw_chains = built.net.draw_chains if built.draws_chains else None
    return GrowingMethod(
        built.net,
        info,
        eos_token_ids=eos_token_ids,
        grammars=grammars,
        draw_chains=draw_chains,
        beam_width=MAX_TREE_NODES if built.is_one_pass else BEAM_WIDTH,
    )


def _medusa(path: str, target: TargetWeights, dtype: torch.dtype, settings: MethodSettings) -> _Built:
    heads = load_medusa(path, target, dtype).to(settings.device)
    vocabulary = TargetVocabulary(target.vocab_size, heads.token_map)
    num_heads = heads.config.num_heads
    make_row_invariant(heads, _ops(settings).row_backend)
    net = MedusaNet(heads, vocabulary, dtype, settings.device)
    on_device = _draws_on_device(settings)
    return _Built(net, (target.num_layers,), False, num_heads, draws_chains=on_device, is_one_pass=True)


def _mlp_speculator(path: str, target: TargetWeights, dtype: torch.dtype, settings: MethodSettings) -> _Built:
    speculator = load_mlp_speculator(path, target, dtype).to(settings.device)
    vocabulary = TargetVocabulary(target.vocab_size, None)
    n_predict = speculator.config.n_predict
    make_row_invariant(speculator, _ops(settings).row_backend)
    net = MlpSpeculatorNet(speculator, vocabulary, dtype, settings.device)
    return _Built(net, (target.num_layers,), False, n_predict, draws_chains=_draws_on_device(settings))


def _eagle(path: str, target: TargetWeights, dtype: torch.dtype, settings: MethodSettings) -> _Built:
    return _feature_net(load_eagle(path, target, dtype), target.vocab_size, dtype, settings)


def _eagle3(path: str, target: TargetWeights, dtype: torch.dtype, settings: MethodSettings) -> _Built:
    head = load_eagle3(path, target, dtype)
    make = _feature_net if head.config.mask_token_id is None else _parallel_net
    return make(head, target.vocab_size, dtype, settings)


def _block(path: str, target: TargetWeights, dtype: torch.dtype, settings: MethodSettings) -> _Built:
    head = load_block(path, target, dtype)
    paged = PagedBlock(head, _ops(settings), dtype, graphs=not settings.enforce_eager, **_memory(settings))
    chains = BlockChains(paged) if paged.is_recordable else None
    vocabulary = TargetVocabulary(target.vocab_size, head.target_ids)
    net = BlockNet(paged, vocabulary, prefill_chunk_size=settings.prefill_chunk_size, chains=chains)
    depth = head.config.max_num_draft_tokens
    return _Built(net, net.hidden_layers, True, depth, draws_chains=chains is not None, is_one_pass=True)


def _assistant(head: AssistantHead, dtype: torch.dtype, settings: MethodSettings) -> _Built:
    paged = PagedAssistant(head, _ops(settings), dtype, **_memory(settings))
    vocabulary = TargetVocabulary(head.config.layers.vocab_size, None)
    net = AssistantNet(paged, vocabulary, prefill_chunk_size=settings.prefill_chunk_size)
    return _Built(net, net.hidden_layers, True, MAX_EAGLE_DEPTH)


def _feature_net(head: Any, vocab_size: int, dtype: torch.dtype, settings: MethodSettings) -> _Built:
    vocabulary = TargetVocabulary(vocab_size, head.target_ids)
    paged = PagedHead(head, _ops(settings), dtype, graphs=not settings.enforce_eager, **_memory(settings))
    chains: Any = None
    if _draws_on_device(settings):
        from outrider.engine.sampling.device_chains import DeviceChains  # needs triton, installed on GPU machines

        chains = DeviceChains(HeadForward(paged, vocabulary, graphs=not settings.enforce_eager))
    elif paged.is_recordable:
        chains = recorded_chains(paged)
    net = EagleNet(paged, vocabulary, prefill_chunk_size=settings.prefill_chunk_size, chains=chains)
    return _Built(net, net.hidden_layers, True, MAX_EAGLE_DEPTH, draws_chains=chains is not None)


def _parallel_net(head: Eagle3Head, vocab_size: int, dtype: torch.dtype, settings: MethodSettings) -> _Built:
    paged = PagedHead(head, _ops(settings), dtype, graphs=not settings.enforce_eager, **_memory(settings))
    vocabulary = TargetVocabulary(vocab_size, head.target_ids)
    net = ParallelEagleNet(paged, vocabulary, prefill_chunk_size=settings.prefill_chunk_size)
    return _Built(net, net.hidden_layers, True, MAX_EAGLE_DEPTH, is_one_pass=True)


def _memory(settings: MethodSettings) -> dict[str, Any]:
    """Returns the arguments of a head's paged cache."""
    return {
        "kv_cache_bytes": settings.kv_cache_mb * 2**20,
        "block_size": settings.block_size,
        "device": settings.device,
    }


def _draws_on_device(settings: MethodSettings) -> bool:
    return _ops(settings).row_backend == "triton"


def _ops(settings: MethodSettings) -> AttentionOps:
    return resolve_attention_ops(settings.attention_backend, torch.device(settings.device))


_BUILDERS = {
    "medusa": _medusa,
    "mlp_speculator": _mlp_speculator,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "dflash": _block,
    "dspark": _block,
}
