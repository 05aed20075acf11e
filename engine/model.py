"""Loading a checkpoint so that every layer's attention is ours and every row's bits are its own.

Not here: running it (runner), the cache (paged_kv), what is refused (model_guards). Architectures are
transformers'; none is copied.

    loaded = load_model("models/target", dtype="auto")
    runner = ModelRunner(loaded, loaded.make_cache(num_blocks=256))
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine import model_guards
from engine.attention import (
    ATTENTION_NAME,
    AttentionOps,
    PagedContext,
    register_attention,
    resolve_attention_ops,
)
from engine.batch import ForwardBatch, SessionRows, build_batch
from engine.errors import BackendUnavailable, ModelRefused
from engine.lean import LeanReport, make_lean
from engine.paged_kv import DEFAULT_BLOCK_SIZE, LayerShape, PagedKVCache, bytes_per_block
from engine.row_invariance import RowInvarianceReport, make_row_invariant
from engine.row_invariant_experts import EXPERTS_NAME, register_experts
from engine.tensor_parallel.collectives import Collectives
from engine.tensor_parallel.shard import Shard
from kernels.errors import KernelArgumentError

if TYPE_CHECKING:
    from engine.tensor_parallel.leader import Leader

logger = logging.getLogger(__name__)

# (path, dtype, device) -> the model in eval mode, built with ATTENTION_NAME.
MakeModel = Callable[[str, torch.dtype, torch.device], Any]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what its owners need to know about it."""

    path: str
    architecture: str  # class name, e.g. "LlamaForCausalLM"
    model: Any  # transformers PreTrainedModel
    config: Any  # transformers PretrainedConfig of the text model
    dtype: torch.dtype
    device: torch.device
    attention_ops: AttentionOps
    layer_shapes: tuple[LayerShape, ...]
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    row_invariance: RowInvarianceReport | None  # None: loaded with row_invariant=False
    lean: LeanReport | None = None  # None: loaded with row_invariant=False or lean=False
    leader: Leader | None = None  # of the other ranks of a tensor-parallel model; on rank 0 alone

    def make_cache(self, num_blocks: int, block_size: int = DEFAULT_BLOCK_SIZE) -> PagedKVCache:
        """A zeroed cache of num_blocks blocks for all layers."""
        make = PagedKVCache if self.leader is None else self.leader.make_cache
        return make(
            self.layer_shapes,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self.dtype,
            device=self.device,
            ops=self.attention_ops,
        )

    def in_step(self, cache: PagedKVCache, batch: ForwardBatch) -> AbstractContextManager[None]:
        """To be entered around each forward: the other ranks of a tensor-parallel model then run it too."""
        return nullcontext() if self.leader is None else self.leader.in_step(cache, batch)

    def close(self) -> None:
        """Ends the other ranks of a tensor-parallel model."""
        if self.leader is not None:
            self.leader.close()

    def bytes_per_block(self, block_size: int = DEFAULT_BLOCK_SIZE) -> int:
        """Bytes of one block over all layers, of this rank's share."""
        return bytes_per_block(self.layer_shapes, block_size, self.dtype)

    def decoder_layer(self, layer: int) -> torch.nn.Module:
        """The module whose output is the residual stream after `layer`."""
        return self._layer_list()[1][layer]

    def body(self) -> torch.nn.Module:
        """The module that holds the decoder layers; its output is what the head reads, after the final norm."""
        return self._layer_list()[0]

    def _layer_list(self) -> tuple[torch.nn.Module, torch.nn.ModuleList]:
        """The list of decoder layers, an ancestor of every attention module, and the module that holds it."""
        name = self.layer_shapes[0].module_name
        parts = name.split(".")
        for length in range(1, len(parts)):
            holder = self.model.get_submodule(".".join(parts[: length - 1]))
            layers = getattr(holder, parts[length - 1])
            if isinstance(layers, torch.nn.ModuleList) and len(layers) == self.num_layers:
                return holder, layers
        raise ModelRefused(self.path, f"no list of decoder layers above {name}")


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    attention_backend: str = "auto",
    max_model_len: int | None = None,
    num_threads: int | None = None,
    row_invariant: bool = True,
    lean: bool = True,
    on_progress: Callable[[str], None] | None = None,
    collectives: Collectives | None = None,
    make_model: MakeModel | None = None,
) -> LoadedModel:
    """Load a checkpoint (directory or hub id, safetensors only, no code from the checkpoint).

    dtype "auto" (the checkpoint's), "bfloat16" or "float32"; device "auto", "cpu" or "cuda"; num_threads sets torch's
    thread count for the process. row_invariant=False keeps transformers' own linears: a row's bits then
    depend on its batch-mates, which is of use for comparisons only; so is lean=False, which keeps its other modules.
    collectives: load this rank's share of a tensor-parallel model; every rank has to (see tensor_parallel/leader).
    make_model: makes the weights, of which path then holds none, only the config (for measurements).
    Raises ModelRefused (with cause and fix) and BackendUnavailable.
    """
    report = on_progress or (lambda _message: None)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    torch_device = _resolve_device(device)
    ops = resolve_attention_ops(attention_backend, torch_device)
    logger.info("attention backend %s on %s", ops.backend, torch_device)
    config = model_guards.read_config(path)
    model_guards.require_supported_architecture(path, config)
    max_len = model_guards.resolve_max_model_len(path, config, max_model_len)
    if make_model is None:
        model_guards.require_safetensors(path)
    torch_dtype = model_guards.resolve_dtype(path, config, dtype)
    report(f"reading weights of {path} as {str(torch_dtype).removeprefix('torch.')}")
    # What a rank does not keep must not have to fit on its device.
    read = make_model or _read_weights
    model = read(path, torch_dtype, torch_device if collectives is None else torch.device("cpu"))
    text_config = model.config.get_text_config()
    num_layers = int(text_config.num_hidden_layers)
    layer_shapes = model_guards.probe_layers(path, model, ops, num_layers)
    model_guards.require_windows(path, config, layer_shapes, max_len)
    shard = None
    if collectives is not None:
        report(f"keeping the share of rank {collectives.rank} of {collectives.size}")
        shard = Shard(path, model, layer_shapes, collectives)
        model.to(torch_device)
        layer_shapes = model_guards.probe_layers(path, model, ops, num_layers)
    invariance = lean_report = None
    if row_invariant and lean:
        report("fusing layers")
        lean_report = make_lean(model, layer_shapes, ops, max_positions=max_len)
        logger.info("%s", lean_report.describe())
    if shard is not None:
        shard.connect()
    if row_invariant:
        report("preparing row-invariant linears")
        invariance = make_row_invariant(model, ops.row_backend)
        # Again: a module that reads a weight which is now packed must fail here, not in the first request.
        model_guards.probe_layers(path, model, ops, num_layers)
    loaded = LoadedModel(
        path=path,
        architecture=type(model).__name__,
        model=model,
        config=text_config,
        dtype=torch_dtype,
        device=torch_device,
        attention_ops=ops,
        layer_shapes=tuple(layer_shapes),
        vocab_size=int(text_config.vocab_size),
        hidden_size=int(text_config.hidden_size),
        num_layers=num_layers,
        max_model_len=max_len,
        eos_token_ids=model_guards.read_eos_token_ids(path, config),
        row_invariance=invariance,
        lean=lean_report,
    )
    report("warming up the attention kernels")
    _warm_up(loaded)
    if shard is not None:
        shard.require_agreement(layer_shapes, ops)
    return loaded


@torch.inference_mode()
def _warm_up(loaded: LoadedModel) -> None:
    """One row through the real kernels: they are compiled now, and shapes that they cannot take fail now."""
    cache = loaded.make_cache(num_blocks=1)
    batch = build_batch([SessionRows([0], 0, [0], 1)], cache.block_size, loaded.device)
    try:
        loaded.model(
            batch.token_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            logits_to_keep=batch.logits_rows,
            paged=PagedContext(loaded.attention_ops, batch, cache),
        )
    except KernelArgumentError as error:
        backend = loaded.attention_ops.backend
        cause = f"the {backend} attention kernel cannot take its heads: {error}"
        raise ModelRefused(loaded.path, cause, 'use attention_backend="reference", which is slow') from error


def _resolve_device(device: str) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise BackendUnavailable(f"device={device!r}: choose one of auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable("device='cuda': this torch sees no CUDA device; use device='cpu'")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def _read_weights(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    register_attention()
    register_experts()
    show_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # the caller shows progress, once, in its own way
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            experts_implementation=EXPERTS_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelRefused(path, f"transformers cannot load it: {error}") from error
    finally:
        if show_bar:
            transformers_logging.enable_progress_bar()
    model_guards.require_all_weights(path, loading_info)
    return model.to(device).eval().requires_grad_(False)
