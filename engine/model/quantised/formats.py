"""Maps a quantisation method to its format, and reads a folder's weights with it.

Not here: which methods and settings are refused (shared/checkpoint/readable).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch

from outrider.engine.errors import ModelRefused
from outrider.engine.model.quantised import (
    ascend,
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    modelopt,
    mxfp4,
)
from outrider.engine.model.quantised.packed_weight import Format, PackedWeight, packed_weights
from outrider.engine.model.weight_files import StoredTensor, WeightReader
from outrider.kernels.linear.codes import Codes
from outrider.shared.checkpoint.quantization import Quantization

Unpacked = TypeVar("Unpacked", torch.Tensor, Codes)

FORMATS: dict[str, Format] = {
    "ascend": ascend.FORMAT,
    "auto-round": auto_round.FORMAT,
    "awq": awq.FORMAT,
    "bitsandbytes": bitsandbytes.FORMAT,
    "compressed-tensors": compressed_tensors.FORMAT,
    "fp8": fp8.FORMAT,
    "gptq": gptq.FORMAT,
    "modelopt": modelopt.FORMAT,
    "mxfp4": mxfp4.FORMAT,
}


def unpacking(
    path: str, quantization: Quantization, stored: dict[str, StoredTensor]
) -> tuple[dict[str, WeightReader], dict[str, StoredTensor]]:
    """Returns (reader of each packed weight, tensors that are not packed). Raises ModelRefused when none is packed."""
    form = FORMATS[quantization.method]
    kept = {name: tensor for name, tensor in stored.items() if not name.endswith(form.ignored)}
    packed = packed_weights(path, form, kept)
    if not packed:
        cause = f"{quantization.file} says that its weights are quantised ({quantization.method}), but none is packed"
        raise ModelRefused(path, cause, f"if they are plain, remove that from {Path(path) / quantization.file}")
    parts = {part.name for weight in packed.values() for part in weight.parts.values()}
    one_at_a_time = Lock()
    readers = {name: _reader(weight, form, quantization.settings, one_at_a_time) for name, weight in packed.items()}
    return readers, {name: tensor for name, tensor in kept.items() if name not in parts}


def _reader(weight: PackedWeight, form: Format, settings: Mapping[str, Any], one_at_a_time: Lock) -> WeightReader:
    """Returns the weight's reader, which unpacks one weight at a time.

    transformers reads on several threads, and unpacking temporarily takes several times the weight's memory.
    """

    def unpacked(unpack: Callable[[PackedWeight, Mapping[str, Any]], Unpacked]) -> Unpacked:
        try:
            with one_at_a_time:
                return unpack(weight, settings)
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
            raise weight.refused(f"its tensors do not fit each other or the config: {error!r}") from error

    def require_finite(*parts: torch.Tensor | None) -> None:
        if not all(bool(torch.isfinite(part.float()).all()) for part in parts if part is not None):
            raise weight.refused("it has values that are not finite")

    def read() -> torch.Tensor:
        values = unpacked(form.dequantise)
        require_finite(values)
        return values

    def codes(unpack: Callable[[PackedWeight, Mapping[str, Any]], Codes]) -> Codes:
        found = unpacked(unpack)
        require_finite(found.scales, found.minimums, None if found.numbers.dtype == torch.int8 else found.numbers)
        return found

    def expert_codes(unpack: Callable[[PackedWeight, int], Codes], expert: int) -> Codes:
        return codes(lambda weight, _: unpack(weight, expert))

    if form.codes is not None and weight.num_experts is not None:
        of_weight = form.codes
        return WeightReader(
            read, None, lambda expert: codes(lambda weight, settings: of_weight(weight.of_expert(expert), settings))
        )
    return WeightReader(
        read,
        None if form.codes is None else partial(codes, form.codes),
        None if form.expert_codes is None else partial(expert_codes, form.expert_codes),
    )
