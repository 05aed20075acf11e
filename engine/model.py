"""Loading a checkpoint so that every layer's attention is ours and every row's bits are its own.

Not here: running it (runner), the cache (paged_kv), what is refused (model_guards). Architectures are
transformers'; none is copied.

    loaded = load_model("models/target", dtype="auto")
    runner = ModelRunner(loaded, loaded.make_cache(num_blocks=256))
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
from engine.batch import SessionRows, build_batch
from engine.errors import BackendUnavailable, ModelRefused
from engine.lean import LeanReport, make_lean
from engine.paged_kv import DEFAULT_BLOCK_SIZE, LayerShape, PagedKVCache, bytes_per_block
from engine.row_invariance import RowInvarianceReport, make_row_invariant
from engine.row_invariant_experts import EXPERTS_NAME, register_experts
from kernels.errors import KernelArgumentError

logger = logging.getLogger(__name__)


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

    def make_cache(self, num_blocks: int, block_size: int = DEFAULT_BLOCK_SIZE) -> PagedKVCache:
        """A zeroed cache of num_blocks blocks for all layers."""
        return PagedKVCache(
            self.layer_shapes,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self.dtype,
            device=self.device,
            ops=self.attention_ops,
        )

    def bytes_per_block(self, block_size: int = DEFAULT_BLOCK_SIZE) -> int:
        """Bytes of one block over all layers."""
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
) -> LoadedModel:
    """Load a checkpoint (directory or hub id, safetensors only, no code from the checkpoint).

    dtype "auto" (the checkpoint's), "bfloat16" or "float32"; device "auto" or "cpu"; num_threads sets torch's
    thread count for the process. row_invariant=False keeps transformers' own linears: a row's bits then
    depend on its batch-mates, which is of use for comparisons only; so is lean=False, which keeps its other modules.
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
    model_guards.require_safetensors(path)
    torch_dtype = model_guards.resolve_dtype(path, config, dtype)
    report(f"reading weights of {path} as {str(torch_dtype).removeprefix('torch.')}")
    model = _read_weights(path, torch_dtype, torch_device)
    text_config = model.config.get_text_config()
    num_layers = int(text_config.num_hidden_layers)
    layer_shapes = model_guards.probe_layers(path, model, ops, num_layers)
    model_guards.require_windows(path, config, layer_shapes, max_len)
    invariance = lean_report = None
    if row_invariant:
        if lean:
            report("fusing layers")
            lean_report = make_lean(model, layer_shapes, ops, max_positions=max_len)
            logger.info("%s", lean_report.describe())
        report("preparing row-invariant linears")
        invariance = make_row_invariant(model)
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
    if device not in ("auto", "cpu"):
        raise BackendUnavailable(
            f"device={device!r}: only the CPU kernels exist, the triton kernels do not yet; use device='cpu'"
        )
    return torch.device("cpu")


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
