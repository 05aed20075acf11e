"""Builds transformers' model and fills it from the checkpoint's files, tensor by tensor.

transformers renames tensors and merges experts; it never sees a quantised tensor. Not here: what the files hold
(weight_files), reading packed weights (quantised), what is made of the model (load).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from outrider.engine.attention.layer import ATTENTION_NAME, register_attention
from outrider.engine.errors import ModelRefused
from outrider.engine.model import coded_experts, coded_weights, text_part
from outrider.engine.model import guards as model_guards
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.tensors import gguf_readers
from outrider.engine.model.own_attention import adapt as own_attention
from outrider.engine.model.quantised.formats import unpacking
from outrider.engine.model.row_invariant_experts import EXPERTS_NAME, register_experts
from outrider.engine.model.row_kernels import CodeKernels
from outrider.engine.model.weight_files import StoredTensor, WeightReader, stored_tensors
from outrider.shared.checkpoint.file_names import linked_parts
from outrider.shared.checkpoint.quantization import read_quantization

logger = logging.getLogger(__name__)


class LazyTensor:
    """Stands in for a safetensors slice: `[...]` reads it. transformers reads only those that the model has.

    transformers reports an error while reading as one of its own; `refusals` keeps the cause.
    """

    def __init__(self, read: Callable[[], torch.Tensor], refusals: list[ModelRefused]) -> None:
        self._read = read
        self._refusals = refusals

    def __getitem__(self, _index: object) -> torch.Tensor:
        try:
            return self._read()
        except ModelRefused as refusal:
            self._refusals.append(refusal)
            raise


def read_weights(
    path: str,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    code_kernels: CodeKernels | None = None,
    for_engine: bool = True,
) -> Any:
    """Returns the model in eval mode.

    code_kernels: quantised weights wait as coded_weights, to be packed for these. for_engine: with the engine's
    attention and experts; False: with transformers' own. Raises ModelRefused.
    """
    refusals: list[ModelRefused] = []
    readers = _readers(path)
    model_guards.require_layers(path, config, len(readers))
    if text_part.is_wrapper(config):
        readers = text_part.text_tensors(readers)
        config = text_part.with_tying(config, readers)
    waiting, experts = _waiting(path, config, readers, code_kernels) if code_kernels else ({}, {})
    reads = readers | {name: partial(weight.stand_in, dtype) for name, weight in waiting.items()}
    for name, of_layer in experts.items():
        reads = {source: read for source, read in reads.items() if source not in of_layer.sources}
        reads[name] = partial(coded_weights.stand_in, of_layer.shape, dtype)
    tensors = {name: LazyTensor(read, refusals) for name, read in reads.items()}
    model = build_model(path, config, tensors, refusals, dtype, for_engine=for_engine)
    if read_quantization(Path(path)) is not None and any(isinstance(part, Conv1D) for part in model.modules()):
        # transformers might take a square matrix for its own transpose.
        raise ModelRefused(path, "its weights are quantised, and its linears are transformers' Conv1D, transposed")
    if code_kernels is not None:
        coded_weights.place(path, model, waiting, code_kernels)
    coded_experts.place(model, experts)
    num_packed = len(waiting) + sum(len(of_layer.sources) for of_layer in experts.values())
    if num_packed:
        logger.info("%d quantised weights stay packed in memory", num_packed)
    return model.to(device).eval().requires_grad_(False)


def build_model(
    path: str,
    config: Any,
    tensors: Mapping[str, LazyTensor],
    refusals: list[ModelRefused],
    dtype: torch.dtype,
    *,
    for_engine: bool = True,
) -> Any:
    """Returns transformers' causal language model on the CPU, filled with tensors of the checkpoint by name.

    refusals: that of the lazy tensors; for_engine: as for read_weights. Raises ModelRefused, also for a weight that no
    tensor fills.
    """
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    if for_engine:
        register_attention()
        register_experts()
        # Some that compute attention themselves know no other name when they are made.
        name = "eager" if config.model_type in own_attention.TYPES else ATTENTION_NAME
        options |= {"attn_implementation": name, "experts_implementation": EXPERTS_NAME}
    # transformers' report of a checkpoint goes to our log, not to standard error through its own handler.
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    show_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # the caller shows progress
    try:
        model_class, own_config = _text_model(config)
        model, loading_info = model_class.from_pretrained(None, config=own_config, state_dict=dict(tensors), **options)
    # Sizes of 0, and other kinds of values, fail anywhere in transformers' code.
    except (OSError, ValueError, RuntimeError, ArithmeticError, LookupError, TypeError, StopIteration) as error:
        if refusals:
            raise refusals[0] from error
        cause = str(error) or type(error).__name__
        if "ignore_mismatched_sizes" in cause:
            cause = "the sizes of its weights are not those of its config.json; the warning above names them"
        raise ModelRefused(path, f"transformers cannot load it: {cause}") from error
    finally:
        if show_bar:
            transformers_logging.enable_progress_bar()
    model_guards.require_all_weights(path, loading_info)
    if linked_parts(Path(path)):
        model_guards.require_all_used(path, loading_info)
    return model


def lazy_tensors(path: str, refusals: list[ModelRefused]) -> dict[str, LazyTensor]:
    """Maps a weight's name in the checkpoint to the weight; quantised ones are dequantised when they are read."""
    return {name: LazyTensor(read, refusals) for name, read in _readers(path).items()}


def _readers(path: str) -> dict[str, WeightReader]:
    parts = linked_parts(Path(path))
    if parts:
        return gguf_readers(GgufFile(path, parts, has_vocabulary=False))
    stored = stored_tensors(Path(path))
    readers: dict[str, WeightReader] = {}
    quantization = read_quantization(Path(path))
    if quantization is not None:
        readers, stored = unpacking(path, quantization, stored)
    return readers | {name: WeightReader(_plain(path, tensor)) for name, tensor in stored.items()}


def _waiting(
    path: str, config: Any, readers: dict[str, WeightReader], kernels: CodeKernels
) -> tuple[dict[str, coded_weights.Waiting], dict[str, coded_weights.WaitingExperts]]:
    """Returns waiting weights by parameter name: those of linears and embeddings, and those of experts."""
    if all(reader.codes is None and reader.expert_codes is None for reader in readers.values()):
        return {}, {}
    try:
        with torch.device("meta"):
            model_class, own_config = _text_model(config)
            skeleton = model_class(own_config)
    except (KeyError, ValueError, RuntimeError):
        return {}, {}  # build_model fails in the same way, and says why
    experts = coded_experts.waiting_experts(path, skeleton, readers, kernels)
    return coded_weights.waiting(path, skeleton, readers), experts


def _plain(path: str, stored: StoredTensor) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        if not stored.is_float:
            cause = f"tensor {stored.name} is stored as {stored.stored_type} without a scale that says what it means"
            raise ModelRefused(path, cause, "serve the bfloat16 or float32 checkpoint that it was made from")
        return stored.read()

    return read


def _text_model(config: Any) -> tuple[Any, Any]:
    """Returns transformers' causal language model class for a config, and the config that it takes: for most multimodal
    types the text part's."""
    model_class: Any = text_part.model_class(config)
    config = _without_quantization(config)
    text_config = config.get_text_config()
    return model_class, text_config if model_class.config_class is type(text_config) else config


def _without_quantization(config: Any) -> Any:
    """Returns the config without its quantization_config, for which transformers would build linears of its own."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config
