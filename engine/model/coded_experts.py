"""Finds the quantised weights of mixtures' experts in a checkpoint, so that each expert is packed separately.

The model has all experts of a layer in one parameter. A checkpoint stores them the same way (gpt-oss), or weight by
weight; transformers would then stack and join them, as its own table of conversions says. Not here: the weights that
wait to be packed (coded_weights), how an expert is packed (row_invariant_experts).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from outrider.engine.model.coded_weights import Waiting, WaitingExperts
from outrider.engine.model.row_invariant_experts import is_experts, weight_names
from outrider.engine.model.row_kernels import CodeKernels
from outrider.engine.model.weight_files import WeightReader


def waiting_experts(
    path: str, skeleton: Any, readers: Mapping[str, WeightReader], kernels: CodeKernels
) -> dict[str, WaitingExperts]:
    """Maps a parameter's name to its experts, where all of their weights have codes.

    skeleton: the model on the meta device; kernels: those that the experts are to be packed for. A conversion that does
    more than stack and join is left to transformers.
    """
    modules = {
        f"{name}.{weight}": module
        for name, module in skeleton.named_modules()
        if is_experts(module)
        for weight in weight_names(module)
    }
    sources = _sources(skeleton, readers) if modules else {}
    found = {}
    for name, module in modules.items():
        shape, own = tuple(skeleton.get_parameter(name).shape), sources.get(name, [])
        if len(own) == 1 and len(own[0]) == 1 and readers[own[0][0]].expert_codes is not None:
            waiting = _of_stack(path, own[0][0], shape, readers, kernels, is_transposed=module.is_transposed)
        else:
            waiting = None if module.is_transposed else _one_by_one(path, shape, own, readers, kernels)
        if waiting is not None:
            found[name] = waiting
    return found


def place(model: torch.nn.Module, experts: Mapping[str, WaitingExperts]) -> None:
    """Puts the experts in the place of the stand-ins."""
    for name, waiting in experts.items():
        parent, _, child = name.rpartition(".")
        module = model.get_submodule(parent)
        delattr(module, child)
        setattr(module, child, waiting)


def _sources(skeleton: Any, readers: Iterable[str]) -> dict[str, list[list[str]]]:
    """Maps a parameter's name -> names of the weights that make it up, as transformers' loader finds them.

    The outer list has an entry for each pattern whose tensors are joined; the inner list names those that are stacked.
    """
    transforms = get_model_conversion_mapping(skeleton)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    patterns_of = {
        pattern: converter.source_patterns
        for converter in converters
        if _stacks_and_joins(converter)
        for pattern in converter.source_patterns
    }
    parameters, prefix = skeleton.state_dict(), skeleton.base_model_prefix
    by_pattern: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    for source in sorted(readers, key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, prefix, parameters)
        by_pattern[name][pattern].append(source)
    found = {}
    for name, own in by_pattern.items():
        patterns = [None] if None in own else patterns_of.get(next(iter(own)), [])
        if own.keys() == set(patterns):
            found[name] = [own[pattern] for pattern in patterns]
    return found


def _stacks_and_joins(converter: WeightConverter) -> bool:
    """Returns whether it makes [E, N, K] of E weights for each of its patterns, and joins the patterns' outputs."""
    steps = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
    stacks, joins = (MergeModulelist, 0), (Concatenate, 1)
    return steps == ([stacks, joins] if len(converter.source_patterns) > 1 else [stacks])


def _of_stack(
    path: str,
    source: str,
    shape: tuple[int, ...],
    readers: Mapping[str, WeightReader],
    kernels: CodeKernels,
    *,
    is_transposed: bool,
) -> WaitingExperts | None:
    read = readers[source].expert_codes
    if read is None:
        return None
    num_experts, outputs, inputs = (shape[0], shape[2], shape[1]) if is_transposed else shape
    waiting = (
        Waiting(path, f"{source}[{expert}]", (outputs, inputs), partial(read, expert)) for expert in range(num_experts)
    )
    return WaitingExperts(shape, tuple((part,) for part in waiting), (source,), kernels)


def _one_by_one(
    path: str,
    shape: tuple[int, ...],
    sources: Sequence[Sequence[str]],
    readers: Mapping[str, WeightReader],
    kernels: CodeKernels,
) -> WaitingExperts | None:
    num_experts, outputs, inputs = shape
    names = [name for of_pattern in sources for name in of_pattern]
    codes = {name: readers[name].codes for name in names}
    if not sources or None in codes.values() or {len(of_pattern) for of_pattern in sources} != {num_experts}:
        return None  # where some are missing, transformers says so

    of_part = (outputs // len(sources), inputs)
    waiting = {name: Waiting(path, name, of_part, read) for name, read in codes.items() if read is not None}
    parts = (tuple(waiting[name] for name in of_expert) for of_expert in zip(*sources, strict=True))
    return WaitingExperts(shape, tuple(parts), tuple(names), kernels)
