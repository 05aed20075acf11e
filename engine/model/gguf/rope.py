"""Makes the rope_parameters of a config from a GGUF file's keys rope.* and its rope_freqs or rope_factors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outrider.engine.errors import ModelRefused
from outrider.engine.model.gguf.file import GgufFile

# Llama 3.1 to 3.3: (low_freq_factor, high_freq_factor, original_max_position_embeddings); the file has the result only.
_LLAMA3 = (1.0, 4.0, 8192)
# rotations within the original context; YaRN blends its two scalings between these bounds (its paper, section 3.4)
_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
# Tensors with longrope's divisors: for sequences beyond the original context, and up to it.
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
LONGROPE_FACTORS = frozenset((_LONG_FACTORS, _SHORT_FACTORS))
# relative; largest difference between a value in the file, stored as float32, and the same in float64
_FLOAT32 = 1e-6


def rope_parameters(file: GgufFile) -> dict[str, Any]:
    """Reads rope_parameters. Raises ModelRefused for scalings that are not read."""
    base = file.own("rope.freq_base", 10000.0)
    kind, factor = file.own("rope.scaling.type", "none"), file.own("rope.scaling.factor", 1.0)
    file.own("rope.scaling.finetuned", False)
    original = file.own("rope.scaling.original_context_length", 0)
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise file.not_read(f"it has rope_freqs and rope.scaling.type {kind!r}")
        return {"rope_theta": base} | _llama3(file, base)
    if kind == "none":
        return {"rope_theta": base, "rope_type": "default"}
    if kind == "linear":
        return {"rope_theta": base, "rope_type": "linear", "factor": factor}
    if kind == "yarn" and original:
        _require_attention_factor(file, factor)
        betas = {name: file.own(f"rope.scaling.yarn_{name}", beta) for name, beta in _YARN_BETAS.items()}
        scaling = {"factor": factor, "original_max_position_embeddings": original, **betas}
        return {"rope_theta": base, "rope_type": "yarn", **scaling}
    raise file.not_read(f"its rope.scaling.type is {kind!r}, which is not read")


def _require_attention_factor(file: GgufFile, factor: float) -> None:
    """Raises ModelRefused if attention is scaled otherwise than in YaRN's paper."""
    by_rule = 0.1 * math.log(factor) + 1
    found = file.own("rope.scaling.yarn_attn_factor", by_rule)
    if not math.isclose(found, by_rule, rel_tol=_FLOAT32):
        cause = f"its rope.scaling.yarn_attn_factor is {found}, not {by_rule:.6f}, which is not read"
        raise file.not_read(cause)


def longrope_parameters(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Reads Phi-3's rope_parameters.

    The file has each frequency's divisor, for sequences up to the original context and beyond, or none. Raises
    ModelRefused if it has one of the two, or a scaling of another kind.
    """
    file.require("rope.scaling.type", "none", "longrope")
    base, rotated = file.own("rope.freq_base", 10000.0), file.own("rope.dimension_count", head_dim)
    parameters = {"rope_theta": base, "rope_type": "default", "partial_rotary_factor": rotated / head_dim}
    if not LONGROPE_FACTORS & file.tensors.keys():
        return parameters
    missing = LONGROPE_FACTORS - file.tensors.keys()
    if missing:
        raise ModelRefused(file.path, f"it has no tensor {min(missing)}", "download it again")
    long, short = (file.tensors[name].data.astype(np.float64).tolist() for name in (_LONG_FACTORS, _SHORT_FACTORS))
    original = file.own("rope.scaling.original_context_length")
    parameters |= {"original_max_position_embeddings": original, "long_factor": long, "short_factor": short}
    scale = file.own("context_length") / original
    by_rule = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    found = file.own("rope.scaling.attn_factor", by_rule)
    own = {} if math.isclose(found, by_rule, rel_tol=_FLOAT32) else {"attention_factor": found}
    return parameters | own | {"rope_type": "longrope"}


def _llama3(file: GgufFile, base: float) -> dict[str, Any]:
    """Reads Llama 3's scaling from the frequencies' divisors. Raises ModelRefused unless its rule gives the same."""
    found = np.asarray(file.tensors["rope_freqs.weight"].data, np.float64)
    low, high, original = _LLAMA3
    factor = float(found.max())
    wavelengths = 2 * math.pi * base ** (np.arange(len(found)) / len(found))
    smooth = ((original / wavelengths - low) / (high - low)).clip(0, 1)
    if not np.allclose(found, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        raise file.not_read("its rope_freqs are not those of Llama 3's rule, the only one that is read")
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {"rope_type": "llama3", "factor": factor, **dict(zip(names, _LLAMA3, strict=True))}
