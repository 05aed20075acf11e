"""Replaces transformers' recurrent modules by our mixers, by class, and proves each at load.

transformers computes a prompt in chunks and a token in a step, which differ in their bits; our mixers have one form. A
mixer must compute what the original does, on random rows in fp32: so a release of transformers that changed its module
is refused. Runs before everything else that replaces modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from outrider.engine.errors import ModelRefused
from outrider.engine.model.lean import lean_check
from outrider.engine.model.own_attention.passing_on import pass_on
from outrider.engine.recurrent.kernels import RecurrentKernels, resolve_recurrent_kernels
from outrider.engine.recurrent.mixers import gated_delta, mamba1, mamba2, short_conv
from outrider.engine.recurrent.mixers.mixer import RecurrentMixer
from outrider.engine.recurrent.rows import StateRows, recurrent_rows
from outrider.engine.recurrent.states import RecurrentShape, RecurrentStates

# Maps (original, name, state_idx, kernels) -> the mixer. Raises ValueError or AttributeError for another module.
_Builder = Callable[[Any, str, int, RecurrentKernels], RecurrentMixer]

# Builders of mixers, by the class name of transformers' module.
_BUILDERS: dict[str, _Builder] = {
    "Qwen3NextGatedDeltaNet": gated_delta.from_interleaved,
    "Qwen3_5GatedDeltaNet": gated_delta.from_separate,
    "Qwen3_5MoeGatedDeltaNet": gated_delta.from_separate,
    "OlmoHybridGatedDeltaNet": gated_delta.from_olmo,
    "BailingHybridDeltaAttention": gated_delta.from_kimi,
    "KimiLinearDeltaAttention": gated_delta.from_kimi,
    "JambaMambaMixer": mamba1.Mamba1Mixer,
    "MambaMixer": mamba1.Mamba1Mixer,
    "FalconMambaMixer": mamba1.Mamba1Mixer,
    "Mamba2Mixer": mamba2.from_plain,
    "Zamba2MambaMixer": mamba2.from_plain,
    "BambaMixer": mamba2.from_plain,
    "FalconH1Mixer": mamba2.from_falcon_h1,
    "GraniteMoeHybridMambaLayer": mamba2.from_plain,
    "NemotronHMamba2Mixer": mamba2.from_plain,
    "Lfm2ShortConv": short_conv.ShortConvMixer,
    "Lfm2MoeShortConv": short_conv.ShortConvMixer,
}
# rows; length of the proof; more than a convolution's taps
_NUM_ROWS = 9


def adapt(path: str, model: torch.nn.Module, backend: str) -> list[RecurrentShape]:
    """Replaces the recurrent modules in place; returns their shapes, in the order of their state_idx.

    backend: AttentionOps.backend. Raises ModelRefused if a module is not what we know.
    """
    originals = [(name, module) for name, module in model.named_modules() if type(module).__name__ in _BUILDERS]
    mixers: list[RecurrentMixer] = []
    proved: set[Any] = set()
    for name, original in originals:
        kernels = resolve_recurrent_kernels(backend)
        build = _BUILDERS[type(original).__name__]
        try:
            signature = lean_check.signature(original)
            if signature not in proved:
                _prove(original, name, build, kernels)
                proved.add(signature)
            mixer = build(original, name, len(mixers), kernels)
        except (ArithmeticError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise _unknown(path, original, str(error)) from error
        parent_name, _, child_name = name.rpartition(".")
        setattr(model.get_submodule(parent_name), child_name, mixer)
        mixers.append(mixer)
    shapes = [mixer.shape for mixer in mixers]
    if mixers:
        pass_on(model, mixers)
        left = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Conv1d)]
        if left:
            raise ModelRefused(path, f"{left[0]} is a convolution outside the recurrent layers that are known")
    return shapes


def _unknown(path: str, original: torch.nn.Module, cause: str) -> ModelRefused:
    return ModelRefused(path, f"{type(original).__name__} is not computed by our mixer in its place: {cause}")


@torch.inference_mode()
def _prove(original: torch.nn.Module, name: str, build: _Builder, kernels: RecurrentKernels) -> None:
    """Raises ValueError if the mixer computes something else."""
    wide: Any = lean_check.wide_copy(original)
    mixer = build(wide, name, 0, kernels)
    # Nemotron-H clamps the time steps of prompts only (kernels/recurrent/mamba2/reference).
    wide.time_step_limit = (0.0, math.inf)
    device = next(wide.parameters()).device
    rows = torch.randn((_NUM_ROWS, mixer.hidden_size), generator=torch.Generator().manual_seed(11)).to(device)
    states = RecurrentStates([mixer.shape], num_slots=1, num_log_rows=1, dtype=torch.float32, device=device)
    one_session = recurrent_rows([StateRows(None, (), 0, _NUM_ROWS)], [_NUM_ROWS], [()], device)
    ours = mixer.mix(rows, states.layers[0], one_session)
    if not lean_check.is_close(ours, wide(hidden_states=rows[None])[0]):
        raise ValueError("the outputs differ")
