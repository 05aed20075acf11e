"""A packed weight: the stored tensors that make it up, found by the endings of their names.

Not here: what the tensors mean (one file per format), which format a checkpoint has (formats).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.engine.errors import ModelRefused
from outrider.engine.model.weight_files import StoredTensor
from outrider.kernels.linear.codes import Codes


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight. name: that of the unpacked weight in a plain checkpoint; parts: ending -> stored tensor.

    expert: number of the expert whose weight it is, where the parts hold those of all experts of a layer; None: the
    parts are the weight's own.
    """

    path: str
    name: str
    parts: Mapping[str, StoredTensor]
    expert: int | None = None

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def num_experts(self) -> int | None:
        """Returns the number of experts whose matrices the part `.weight` stacks; None: it is one matrix."""
        shape = self.parts[".weight"].shape if ".weight" in self.parts else ()
        return shape[0] if len(shape) == 3 and self.expert is None else None

    def of_expert(self, expert: int) -> PackedWeight:
        return replace(self, expert=expert)

    def __contains__(self, part: str) -> bool:
        return part in self.parts

    def read(self, part: str) -> torch.Tensor:
        if part not in self.parts:
            there = ", ".join(sorted(self.parts))
            raise self.refused(f"{part} is missing beside {there}")
        whole = self.parts[part].read()
        return whole if self.expert is None else whole[self.expert]

    def stored_type(self, part: str) -> str:
        """Returns the part's type; "" if there is no such part."""
        return self.parts[part].stored_type if part in self.parts else ""

    def refused(self, cause: str) -> ModelRefused:
        return ModelRefused(self.path, f"packed weight {self.name}: {cause}", "download the checkpoint again")

    def require_shape(self, what: str, found: Iterable[int], wanted: Iterable[int]) -> None:
        """Raises ModelRefused unless a part has the shape that the others and the config give it."""
        if tuple(found) != tuple(wanted):
            raise self.refused(f"{what} has shape {list(found)}, not {list(wanted)}")


@dataclass(frozen=True)
class Format:
    """Describes how a family of checkpoints packs a weight.

    parts: endings of the names of its tensors, with their separator. ignored: scales of activations and of the KV
    cache, which are not quantised here. dequantise(weight, settings) -> the weight in float32, or in bfloat16 where
    that is exact; settings: the config's quantization object. target: the ending of the weight's own name. codes: the
    weight [N, K] as codes; None: the format has none. expert_codes: likewise for one expert, by its number, where a
    weight holds all experts of a layer.
    """

    parts: tuple[str, ...]
    dequantise: Callable[[PackedWeight, Mapping[str, Any]], torch.Tensor]
    ignored: tuple[str, ...] = ()
    target: str = ".weight"
    codes: Callable[[PackedWeight, Mapping[str, Any]], Codes] | None = None
    expert_codes: Callable[[PackedWeight, int], Codes] | None = None

    @classmethod
    def of_codes(
        cls,
        parts: tuple[str, ...],
        codes: Callable[[PackedWeight, Mapping[str, Any]], Codes],
        ignored: tuple[str, ...] = (),
    ) -> Format:
        """Returns a format in which every weight has codes, and experts may be stacked."""

        def dequantised(weight: PackedWeight, settings: Mapping[str, Any]) -> torch.Tensor:
            if weight.num_experts is None:
                return codes(weight, settings).dequantised()
            experts = range(weight.num_experts)
            return torch.stack([codes(weight.of_expert(expert), settings).dequantised() for expert in experts])

        return cls(parts, dequantised, ignored, codes=codes)


def packed_weights(path: str, form: Format, stored: Mapping[str, StoredTensor]) -> dict[str, PackedWeight]:
    """Maps a weight's name -> packed weight. A float `.weight` without scales is not packed; one with scales is."""
    groups: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        for part in form.parts:
            if name.endswith(part):
                groups.setdefault(name.removesuffix(part) + form.target, {})[part] = tensor
    return {
        name: PackedWeight(path, name, parts)
        for name, parts in groups.items()
        if set(parts) != {form.target} or not parts[form.target].is_float
    }
