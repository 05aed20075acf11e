"""Whatever is in a config or a tensor table: a head is loaded, or CheckpointRefused is raised. Nothing else."""

from __future__ import annotations

import contextlib
import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.drafting.checkpoints.block import load_block
from outrider.drafting.checkpoints.eagle import load_eagle
from outrider.drafting.checkpoints.eagle3 import load_eagle3
from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.medusa import load_medusa
from outrider.drafting.checkpoints.mlp_speculator import load_mlp_speculator
from outrider.drafting.checkpoints.recognise import KINDS, recognise
from outrider.drafting.checkpoints.target_weights import TargetWeights, load_target_weights
from tests.drafting.checkpoints import plain_writer as plain

pytestmark = pytest.mark.storm

Start = tuple[Callable[..., Any], dict[str, Any], plain.Tensors]

STARTS: dict[str, Start] = {
    "medusa": (load_medusa, plain.medusa_config(2, 1), plain.medusa_vllm_tensors(2, 1)),
    "medusa, original": (load_medusa, {"medusa_num_heads": 2}, plain.medusa_original_tensors(2, 1)),
    "mlp": (load_mlp_speculator, plain.mlp_config(), plain.prefixed(plain.mlp_tensors(), "speculator.")),
    "mlp, tied": (load_mlp_speculator, plain.mlp_config(tie_weights=True), plain.mlp_tensors(is_tied=True)),
    "eagle": (load_eagle, plain.eagle1_config(), plain.eagle1_tensors()),
    "eagle3": (load_eagle3, plain.eagle3_config(), plain.eagle3_tensors()),
    "modelopt": (load_eagle3, plain.modelopt_config(), plain.eagle3_tensors(layer="midlayer")),
    "speculators": (load_eagle3, plain.speculators_config(), plain.eagle3_tensors()),
    "dflash": (load_block, plain.zlab_config(), plain.block_tensors()),
    "dspark": (
        load_block,
        plain.block_speculators_config("dspark", markov_rank=plain.MARKOV_RANK),
        plain.block_tensors() | plain.reduced_tensors() | plain.markov_tensors(draft_vocab=plain.DRAFT_VOCAB),
    ),
}
# Keys that loaders read and that the starts do not have.
FURTHER_KEYS = [
    *("rope_scaling", "rope_parameters", "head_dim", "hidden_act", "attention_bias", "mlp_bias", "layer_types"),
    *(
        "truncated_vocab_size",
        "original_lm_head",
        "medusa_fc_bias",
        "num_layers",
        "logit_scale",
        "model",
        "eagle_config",
    ),
    *("fc_norm", "norm_output", "norm_before_fc", "num_aux_hidden_states", "target_hidden_size", "architectures"),
    *(
        "dflash_config",
        "sample_from_anchor",
        "is_causal",
        "use_swa",
        "swa_window_size",
        "sliding_window",
        "projector_type",
    ),
    *("eagle_aux_hidden_state_layer_ids", "model_type", "speculators_model_type", "quantization_config"),
]
NUMBERS = st.one_of(
    st.integers(-3, 50),
    st.sampled_from([2**24, 2**31, 2**63, -(2**70), 10**400]),
    st.floats(),  # also those that are not finite: JSON in Python writes and reads them
)
LEAVES = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.sampled_from(["yarn", "linear", "llama3"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["rope_type", "type", "factor", "rope_theta", "hidden_size", "x"]), inner, max_size=3
        ),
    ),
    max_leaves=5,
)
SHAPES = st.lists(st.integers(0, 40), max_size=3)
DTYPES = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8]
)


@st.composite
def changed(draw: st.DrawFn, config: dict[str, Any], tensors: plain.Tensors) -> tuple[Any, plain.Tensors]:
    """A config with some other values, and a table with some tensors gone, renamed, or of another shape or type."""
    config, tensors = dict(config), dict(tensors)
    for key in draw(st.lists(st.sampled_from([*config, *FURTHER_KEYS]), max_size=3)):
        config[key] = draw(VALUES)
    if "transformer_layer_config" in config and draw(st.booleans()):
        layer = plain.llama_config(num_hidden_layers=1)
        config["transformer_layer_config"] = layer | {draw(st.sampled_from([*layer, "rope_scaling"])): draw(VALUES)}
    for name in draw(st.lists(st.sampled_from(sorted(tensors)), max_size=2, unique=True)):
        tensor = tensors.pop(name)
        change = draw(st.sampled_from(["drop", "rename", "replace", "cast"]))
        if change == "rename":
            tensors[
                draw(
                    st.sampled_from(
                        ["x", "layers.1.x", "midlayer.x", "999.999.linear.weight", "blocks.9.layers.9.bias"]
                    )
                )
            ] = tensor
        elif change == "replace":
            tensors[name] = torch.ones(draw(SHAPES)).to(draw(DTYPES))
        elif change == "cast":
            tensors[name] = tensor.to(draw(DTYPES))
    return config, tensors


@pytest.mark.parametrize("start", STARTS)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_changed_checkpoint_loads_or_is_refused(start: str, target: TargetWeights, data: st.DataObject) -> None:
    load, good_config, good_tensors = STARTS[start]
    config, tensors = data.draw(changed(good_config, good_tensors))
    with tempfile.TemporaryDirectory() as name:
        folder = plain.write(Path(name), config, tensors)
        with contextlib.suppress(CheckpointRefused):
            assert recognise(folder) in KINDS
        with contextlib.suppress(CheckpointRefused):
            head = load(folder, target, torch.float32)
            assert all(not tensor.is_meta for tensor in (*head.state_dict().values(), *head.buffers()))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_changed_target_loads_or_is_refused(data: st.DataObject) -> None:
    config, tensors = data.draw(changed(plain.llama_config(), plain.target_tensors()))
    with tempfile.TemporaryDirectory() as name:
        folder = plain.write(Path(name), config, tensors)
        with contextlib.suppress(CheckpointRefused):
            found = load_target_weights(folder)
            assert found.embedding.shape == found.lm_head.shape == (found.vocab_size, found.hidden_size)


HEADERS = st.dictionaries(
    st.sampled_from(["fc.weight", "__metadata__", "layers.0.hidden_norm.weight", "d2t"]),
    st.one_of(
        VALUES,
        st.fixed_dictionaries(
            {"dtype": st.sampled_from(["F32", "I64", "F8_E4M3", "F4", "?"]), "shape": VALUES, "data_offsets": VALUES}
        ),
    ),
    max_size=3,
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(header=HEADERS, length=st.one_of(st.none(), st.integers(0, 2**64 - 1)), body=st.binary(max_size=200))
def test_a_file_of_garbage_is_refused(header: Any, length: int | None, body: bytes, target: TargetWeights) -> None:
    text = json.dumps(header).encode()
    prefix = struct.pack("<Q", len(text) if length is None else length)
    with tempfile.TemporaryDirectory() as name:
        folder = plain.write(Path(name), plain.eagle3_config(), {})
        (folder / "model.safetensors").write_bytes(prefix + text + body)
        for load in (load_eagle3, load_eagle, load_medusa, load_mlp_speculator):
            with pytest.raises(CheckpointRefused):
                load(folder, target, torch.float32)
