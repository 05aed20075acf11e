"""Loads a checkpoint with paged attention and row-invariant layers. Architectures are transformers'; none is copied.

Not here: the loaded model (loaded), running it (runner), the cache (paged_kv), refused checkpoints (guards).

    loaded = load_model("models/target", dtype="auto")
    runner = ModelRunner(loaded, loaded.make_cache(num_blocks=256))
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.attention.layer import PagedContext
from outrider.engine.attention.ops import AttentionOps, LayerShape, resolve_attention_ops
from outrider.engine.errors import BackendUnavailable, ModelRefused
from outrider.engine.model import guards as model_guards
from outrider.engine.model.end_of_text import read_eos_token_ids
from outrider.engine.model.latent_attention import keep_latents
from outrider.engine.model.lean.make_lean import make_lean
from outrider.engine.model.lean.module_calls import causal_lm_probe
from outrider.engine.model.llama4 import adapt as llama4
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.model.local_model import local_model
from outrider.engine.model.own_attention import adapt as own_attention
from outrider.engine.model.row_invariance import make_row_invariant
from outrider.engine.model.row_invariant_functions import WholeVectorFunctions, run_in_whole_vectors
from outrider.engine.model.row_kernels import resolve_code_kernels
from outrider.engine.model.sparse_indexer import adapt_indexers, require_sizes
from outrider.engine.model.weights import read_weights
from outrider.engine.recurrent.adapt import adapt
from outrider.engine.recurrent.rows import StateRows
from outrider.kernels.errors import KernelArgumentError
from outrider.shared.machine.memory import give_back_freed_memory

logger = logging.getLogger(__name__)

# (path, dtype, device) -> the model in eval mode, built with ATTENTION_NAME.
MakeModel = Callable[[str, torch.dtype, torch.device], Any]


class Share(Protocol):
    """One rank's share of a model that has been cut.

    Contract: a rank computes alone until `connect`, from then on every forward involves all ranks. `require_agreement`
    raises ModelRefused, on rank 0, if they do not compute the whole model.
    """

    def connect(self) -> None: ...

    def require_agreement(self, layer_shapes: list[LayerShape], ops: AttentionOps) -> None: ...


# Cuts a whole model in place; takes its folder, the model and its layers' shapes.
CutModel = Callable[[str, Any, list[LayerShape]], Share]


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
    cut: CutModel | None = None,
    make_model: MakeModel | None = None,
    kv_cache_dtype: str = "auto",
    packed_arithmetic: str = "auto",
) -> LoadedModel:
    """Loads a checkpoint by its folder, .gguf file or Hub id; no code from the checkpoint is run.

    dtype: "auto" (by the checkpoint), "bfloat16", "float32", or "float16": weights rounded to float16, computed in
    float32. device: "auto", "cpu" or "cuda". num_threads: torch's thread count, for the process. row_invariant=False
    keeps transformers' linears, lean=False its other modules: for comparisons only. cut: keeps one rank's share of a
    tensor-parallel model (tensor_parallel/shard), called on every rank. make_model: makes the weights; path then needs
    only the config (for measurements). kv_cache_dtype: "auto" (the model's), or a name of shared/vllm_keys for 8 bits.
    packed_arithmetic: "auto", "int8" or "bf16" (engine/settings).
    Raises ConfigError (no such model), ModelRefused (with cause and fix) and BackendUnavailable.
    """
    report = on_progress or (lambda _message: None)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    torch_device = resolve_device(device)
    ops = resolve_attention_ops(attention_backend, torch_device)
    logger.info("attention backend %s on %s", ops.backend, torch_device)
    path = local_model(path, "model")
    config = model_guards.read_config(path)
    model_guards.require_supported_architecture(path, config)
    require_sizes(path, config.get_text_config())
    max_len = model_guards.resolve_max_model_len(path, config, max_model_len)
    kv_code_dtype = model_guards.resolve_kv_codes(path, config, kv_cache_dtype)
    if make_model is None:
        model_guards.require_weight_files(path)
    torch_dtype = model_guards.resolve_dtype(path, config, dtype)
    report(f"reading weights of {path} as {str(torch_dtype).removeprefix('torch.')}")
    rounding = model_guards.describe_rounding(path, config, dtype)
    if rounding is not None:
        logger.warning("%s: %s", path, rounding)
    # Ranks read on the CPU, as the whole model need not fit on a rank's device.
    read_device = torch_device if cut is None else torch.device("cpu")
    if make_model is None:
        packs = row_invariant and read_device == torch_device
        code_kernels = (
            resolve_code_kernels(ops.row_backend, torch_dtype, torch_device, packed_arithmetic) if packs else None
        )
        model = read_weights(path, config, torch_dtype, read_device, code_kernels=code_kernels)
    else:
        model = make_model(path, torch_dtype, read_device)
    if model_guards.rounds_to_float16(dtype):
        _round_to_float16(path, model)
    text_config = model.config.get_text_config()
    attention_layers = model_guards.attention_layers(config)
    recurrent_shapes = adapt(path, model, ops.backend)
    if recurrent_shapes and cut is not None:
        raise ModelRefused(path, "its recurrent layers cannot be shared among ranks", "set tensor_parallel_size=1")
    llama4.adapt(path, model, ops)
    if own_attention.adapt(path, model) and cut is not None:
        raise ModelRefused(path, "its attention cannot be shared among ranks", "set tensor_parallel_size=1")
    if adapt_indexers(path, model, ops) and cut is not None:
        raise ModelRefused(path, "its indexers cannot be shared among ranks", "set tensor_parallel_size=1")
    layer_shapes = model_guards.probe_layers(path, model, ops, attention_layers, recurrent_shapes)
    model_guards.require_windows(path, config, layer_shapes, max_len)
    model_guards.number_attention_layers(model, layer_shapes)
    attention_layers = list(range(len(layer_shapes)))
    share = None
    if cut is not None:
        report("keeping this rank's share")
        share = cut(path, model, layer_shapes)
        model.to(torch_device)
        layer_shapes = model_guards.probe_layers(path, model, ops, attention_layers)
    # After the cut: a rank has its share of the heads, and the whole latents.
    if row_invariant and keep_latents(model, ops, max_positions=max_len, probe=causal_lm_probe(model)):
        layer_shapes = model_guards.probe_layers(path, model, ops, attention_layers, recurrent_shapes)
    invariance = lean_report = None
    if row_invariant and lean:
        report("fusing layers")
        lean_report = make_lean(model, layer_shapes, ops, max_positions=max_len)
        logger.info("%s", lean_report.describe())
    if share is not None:
        share.connect()
    if row_invariant:
        report("preparing row-invariant linears")
        invariance = make_row_invariant(model, ops.row_backend)
        # Again: a module that reads a packed weight must fail here, not in the first request.
        with WholeVectorFunctions() as functions:
            model_guards.probe_layers(path, model, ops, attention_layers, recurrent_shapes)
        if functions.num_calls and torch_device.type == "cpu":
            logger.info("%d calls of elementwise functions a forward run in whole vectors", functions.num_calls)
            run_in_whole_vectors(model)
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
        num_layers=int(text_config.num_hidden_layers),
        max_model_len=max_len,
        eos_token_ids=read_eos_token_ids(path, config),
        row_invariance=invariance,
        lean=lean_report,
        recurrent_shapes=tuple(recurrent_shapes),
        kv_code_dtype=kv_code_dtype,
    )
    give_back_freed_memory()  # what reading and packing took: 220 MB for 490 MB of GGUF
    report("warming up the attention kernels")
    _warm_up(loaded)
    if share is not None:
        share.require_agreement(layer_shapes, ops)
    return loaded


@torch.no_grad()
def _round_to_float16(path: str, model: torch.nn.Module) -> None:
    """Rounds the weights only: buffers are constants of the architecture."""
    for name, parameter in model.named_parameters():
        parameter.copy_(parameter.to(torch.float16))
        if not bool(torch.isfinite(parameter).all()):
            raise ModelRefused(path, f"{name} has weights beyond float16's range", "set dtype=bfloat16 or float32")


@torch.inference_mode()
def _warm_up(loaded: LoadedModel) -> None:
    """Runs one row through the real kernels: compiles them, and refuses shapes that they do not support."""
    cache = loaded.make_cache(num_blocks=1)
    fresh = SessionRows([0], 0, [0], 1, state=StateRows(None, (), 0, 1))
    batch = build_batch([fresh], cache.block_size, loaded.device)
    try:
        loaded.model(
            batch.token_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            logits_to_keep=batch.logits_rows,
            paged=PagedContext(loaded.attention_ops, batch, cache, states=loaded.make_states(1, 1)),
        )
    except KernelArgumentError as error:
        backend = loaded.attention_ops.backend
        cause = f"the {backend} attention kernel cannot take its heads: {error}"
        raise ModelRefused(loaded.path, cause, 'use attention_backend="reference", which is slow') from error


def resolve_device(device: str) -> torch.device:
    """Returns the device of "auto", "cpu" or "cuda". Raises BackendUnavailable."""
    if device not in ("auto", "cpu", "cuda"):
        raise BackendUnavailable(f"device={device!r}: choose one of auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable("device='cuda': this torch sees no CUDA device; use device='cpu'")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
