"""The recurrences in plain torch: all divisions into calls give one set of bits, and transformers' modules agree."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from transformers import BambaConfig, DynamicCache, JambaConfig, Lfm2Config, NemotronHConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from outrider.kernels.recurrent.gated_delta import reference as gated_delta
from outrider.kernels.recurrent.gated_norm import reference as gated_norm
from outrider.kernels.recurrent.gated_norm.arguments import GatedNormLayer
from outrider.kernels.recurrent.mamba1 import reference as mamba1
from outrider.kernels.recurrent.mamba1.arguments import Mamba1Layer
from outrider.kernels.recurrent.mamba2 import reference as mamba2
from outrider.kernels.recurrent.mamba2.arguments import Mamba2Layer
from outrider.kernels.recurrent.short_conv import reference as short_conv
from outrider.kernels.recurrent.short_conv.arguments import ShortConvLayer
from tests.kernels.recurrent import recurrent_layers as layers
from tests.kernels.recurrent.recurrent_cases import committed, outputs, ways

CASES = {
    "kimi_delta": lambda dtype: layers.kimi_delta_case(gated_delta.gated_delta, dtype),
    "mamba1": lambda dtype: layers.mamba1_case(mamba1.mamba1, dtype),
    "mamba2": lambda dtype: layers.mamba2_case(mamba2.mamba2, dtype),
    "short_conv": lambda dtype: layers.short_conv_case(short_conv.short_conv, dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_every_division_into_calls_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    case = CASES[name](dtype)
    rows, noise = case.inputs(2), case.inputs(3, layers.NUM_ROWS + 4)
    expected = outputs(case.driver(), [committed(rows)])
    assert bool(expected.isfinite().all())
    for way, parts in ways(rows, noise).items():
        assert torch.equal(outputs(case.driver(), parts), expected), way


# ---- against transformers, row by row, as it decodes ----

_BAMBA = {
    "hidden_size": 72,
    "mamba_expand": 2,
    "mamba_n_heads": 6,
    "mamba_d_head": 24,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "num_hidden_layers": 1,
    "attn_layer_indices": [],
}
_NEMOTRON_H = {
    "hidden_size": 96,
    "mamba_num_heads": 6,
    "mamba_head_dim": 24,
    "n_groups": 2,
    "ssm_state_size": 20,
    "layers_block_type": ["linear_attention"],
}


@pytest.fixture(autouse=True)
def _transformers_is_the_oracle() -> None:
    """With these packages transformers would call them, not its own equations."""
    for package in ("fla", "causal_conv1d", "mamba_ssm"):
        assert importlib.util.find_spec(package) is None, f"uninstall {package} to compare with transformers"


def _disturbed(module: torch.nn.Module, dt_bias: float | None = None) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name == "dt_bias" and dt_bias is not None:
                parameter.fill_(dt_bias)
            elif parameter.ndim == 1:
                drawn = name.endswith(".bias")  # by torch, from its global generator
                start = torch.zeros_like(parameter) if drawn else parameter
                parameter.copy_(start + 0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return module.eval()


def _row_by_row(mixer: Any, config: Any, x: torch.Tensor, cache_name: str = "cache_params") -> torch.Tensor:
    """The mixer's outputs of the rows x [T, hidden], each in a call of its own, from a state of zeros."""
    cache = DynamicCache(config=config)
    mixer(x[None, :1], **{cache_name: cache})
    for state in (*cache.layers[0].conv_states.values(), *cache.layers[0].recurrent_states.values()):
        if state is not None:
            state.zero_()
    return torch.cat([mixer(row[None, None], **{cache_name: cache})[0] for row in x])


@pytest.mark.parametrize(
    ("mixer_class", "config_class", "arguments", "dt_bias"),
    [
        (BambaMixer, BambaConfig, _BAMBA, None),
        (NemotronHMamba2Mixer, NemotronHConfig, _NEMOTRON_H, None),
        # The time steps are far below time_step_min (1e-3).
        (NemotronHMamba2Mixer, NemotronHConfig, _NEMOTRON_H, -9.0),
    ],
)
@torch.no_grad()
def test_mamba2_is_what_transformers_decodes(
    mixer_class: type, config_class: type, arguments: dict[str, Any], dt_bias: float | None
) -> None:
    config = config_class(**arguments)
    mixer = _disturbed(mixer_class(config, layer_idx=0), dt_bias)
    x = torch.randn(layers.NUM_ROWS, config.hidden_size, generator=torch.Generator().manual_seed(0))
    width = 6 * 24
    conv = ShortConvLayer(mixer.conv1d.weight[:, 0], mixer.conv1d.bias)
    layer = Mamba2Layer(6, 24, 2, 20, conv, -mixer.A_log.exp(), mixer.dt_bias, mixer.D)
    norm = GatedNormLayer(mixer.norm.weight, width // 2, mixer.norm.variance_epsilon, True, True)
    gate, raw = mixer.in_proj(x).split([width, layer.num_channels + 6], dim=1)
    case = layers.mamba2_case(mamba2.mamba2, torch.float32, layer)
    outcome = outputs(case.driver(), [committed(raw)])
    found = mixer.out_proj(gated_norm.gated_norm(outcome, gate, norm))
    torch.testing.assert_close(found, _row_by_row(mixer, config, x), atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_mamba1_is_what_transformers_decodes() -> None:
    config = JambaConfig(hidden_size=36, num_hidden_layers=2, mamba_d_state=20, mamba_dt_rank=10)
    mixer = _disturbed(JambaMambaMixer(config, layer_idx=0))
    x = torch.randn(layers.NUM_ROWS, 36, generator=torch.Generator().manual_seed(0))
    raw, gate = mixer.in_proj(x).chunk(2, dim=1)
    conv = ShortConvLayer(mixer.conv1d.weight[:, 0], mixer.conv1d.bias)
    layer = Mamba1Layer(conv, -mixer.A_log.exp().t().contiguous(), mixer.dt_proj.bias, mixer.D)

    def project(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dt, b, c = torch.split(mixer.x_proj(rows), [10, 20, 20], dim=1)
        return mixer.dt_layernorm(dt) @ mixer.dt_proj.weight.t(), mixer.b_layernorm(b), mixer.c_layernorm(c)

    case = layers.mamba1_case(mamba1.mamba1, torch.float32, layer, project)
    found = mixer.out_proj(outputs(case.driver(), [committed(raw)]) * torch.nn.functional.silu(gate))
    torch.testing.assert_close(found, _row_by_row(mixer, config, x), atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_the_short_convolution_is_what_transformers_decodes() -> None:
    config = Lfm2Config(hidden_size=96, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=4, conv_bias=True)
    mixer = _disturbed(Lfm2ShortConv(config, layer_idx=0))
    x = torch.randn(layers.NUM_ROWS, 96, generator=torch.Generator().manual_seed(0))
    b, c, values = mixer.in_proj(x).chunk(3, dim=1)
    layer = ShortConvLayer(mixer.conv.weight[:, 0], mixer.conv.bias)
    case = layers.short_conv_case(short_conv.short_conv, torch.float32, layer)
    found = mixer.out_proj(c * outputs(case.driver(), [committed(b * values)]))
    expected = _row_by_row(mixer, config, x, "past_key_values")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
