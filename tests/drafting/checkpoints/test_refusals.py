"""Every kind of mismatch is refused at load, with the tensor or key and both values in the message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafting.checkpoints.eagle import load_eagle
from outrider.drafting.checkpoints.eagle3 import load_eagle3
from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.medusa import load_medusa
from outrider.drafting.checkpoints.mlp_speculator import load_mlp_speculator
from outrider.drafting.checkpoints.target_weights import TargetWeights, load_target_weights
from outrider.shared.errors import ConfigError
from tests.drafting.checkpoints import plain_writer as plain

Loader = Callable[[Path, TargetWeights, torch.dtype], torch.nn.Module]
H, V, D = plain.HIDDEN, plain.VOCAB, plain.DRAFT_VOCAB

# kind -> (loader, config, tensors)
GOOD: dict[str, tuple[Loader, dict[str, Any], plain.Tensors]] = {
    "medusa": (load_medusa, plain.medusa_config(2, 1), plain.medusa_vllm_tensors(2, 1)),
    "mlp": (load_mlp_speculator, plain.mlp_config(), plain.prefixed(plain.mlp_tensors(), "speculator.")),
    "eagle": (load_eagle, plain.eagle1_config(), plain.eagle1_tensors()),
    "eagle3": (load_eagle3, plain.eagle3_config(), plain.eagle3_tensors()),
    "speculators": (load_eagle3, plain.speculators_config(), plain.eagle3_tensors()),
}
BAD_D2T = plain.vocabulary_maps()["d2t"]
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}

# kind, changed tensors (None: taken out), changed settings, message
CASES: list[tuple[str, dict[str, torch.Tensor | None], dict[str, Any], str]] = [
    # a missing tensor: what was wanted, and what there is
    (
        "medusa",
        {"blocks.1.layers.0.weight": None},
        {},
        r"2 heads of 1 layers|num_heads is 2, the file of tensors has 1",
    ),
    ("medusa", {"lm_heads.1.weight": None}, {}, rf"tensor lm_heads.1.weight \[{V}, {H}\] is missing; there are blocks"),
    (
        "mlp",
        {"speculator.proj.2.weight": None},
        {},
        r"tensor speculator.proj.2.weight \[20, 20\] is missing; there are",
    ),
    ("eagle", {"layers.0.mlp.up_proj.weight": None}, {}, r"tensor layers.0.mlp.up_proj.weight \[40, 24\] is missing"),
    ("eagle3", {"fc.weight": None}, {}, rf"tensor fc.weight \[{H}, {3 * H}\] is missing"),
    ("eagle3", {"d2t": None}, {}, "tensor d2t is missing; there are"),
    ("eagle3", {"lm_head.weight": None}, {}, rf"tensor lm_head.weight \[{D}, {H}\] is missing"),
    # a tensor too many
    ("medusa", {"norm.weight": torch.ones(5)}, {}, r"tensor norm.weight \[5\] is unexpected"),
    (
        "mlp",
        {"speculator.emb.3.weight": torch.ones(2, 3)},
        {},
        r"tensor speculator.emb.3.weight \[2, 3\] is unexpected",
    ),
    (
        "eagle",
        {"layers.0.input_layernorm.weight": torch.ones(H)},
        {},
        r"layers.0.input_layernorm.weight \[24\] is unexp",
    ),
    ("eagle3", {"layers.1.mlp.up_proj.weight": torch.ones(2, 2)}, {}, r"layers.1.mlp.up_proj.weight \[2, 2\] is unexp"),
    (
        "eagle3",
        {"input_norm.weight": torch.ones(3 * H)},
        {"norm_before_fc": False},
        r"input_norm.weight \[72\] is unexp",
    ),
    # another shape
    (
        "medusa",
        {"lm_heads.0.weight": torch.ones(V + 1, H)},
        {},
        r"lm_heads.0.weight has shape \[38, 24\].*says \[37, 24\]",
    ),
    ("mlp", {}, {"inner_dim": 21}, r"speculator.emb.0.weight has shape \[37, 20\], the config says \[37, 21\]"),
    (
        "eagle",
        {"fc.weight": torch.ones(H, H)},
        {},
        r"tensor fc.weight has shape \[24, 24\], the config says \[24, 48\]",
    ),
    ("eagle", {"fc.bias": torch.ones(3)}, {}, r"tensor fc.bias has shape \[3\], the config says \[24\]"),
    (
        "eagle3",
        {},
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        r"q_proj.weight has shape \[24, 48\].*\[32, 48\]",
    ),
    ("eagle3", {"d2t": torch.zeros(3).long()}, {}, r"tensor d2t has shape \[3\], the config says \[11\]"),
    ("eagle3", {}, {"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight has shape \[24, 72\].*says \[24, 48\]"),
    ("eagle3", {"embed_tokens.weight": torch.ones(3, H)}, {}, r"embed_tokens.weight has shape \[3, 24\].*\[37, 24\]"),
    # another type, or no number
    ("eagle3", {"d2t": torch.zeros(D)}, {}, "tensor d2t is stored as F32, not as one of I32, I64"),
    (
        "eagle",
        {"fc.weight": torch.ones(H, 2 * H).to(torch.float8_e4m3fn)},
        {},
        "fc.weight is stored as F8_E4M3, not as one",
    ),
    ("eagle", {"fc.bias": torch.full((H,), float("inf"))}, {}, "tensor fc.bias has values that are not finite"),
    # sizes of the target
    ("medusa", {}, {"hidden_size": 32}, "hidden_size is 32, the target .* has 24"),
    ("medusa", {}, {"vocab_size": 38}, "vocab_size is 38, the target .* has 37"),
    ("mlp", {}, {"emb_dim": 32}, r"emb_dim is 32, the target .*\(hidden_size\) has 24"),
    ("mlp", {}, {"vocab_size": 36}, "vocab_size is 36, the target .* has 37"),
    ("eagle", {}, {"hidden_size": 32}, "hidden_size is 32, the target .* has 24"),
    ("eagle", {}, {"vocab_size": 32000}, "vocab_size is 32000, the target .* has 37"),
    ("eagle3", {}, {"vocab_size": 36}, "vocab_size is 36, the target .* has 37"),
    ("eagle3", {}, {"target_hidden_size": 32}, "target_hidden_size is 32, the target .* has 24"),
    (
        "speculators",
        {},
        {"transformer_layer_config": plain.llama_config(vocab_size=9)},
        "vocab_size is 9, the .* has 37",
    ),
    ("eagle3", {}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, r"names hidden state 6 .*target has 0 to 5"),
    # vocabulary maps
    ("eagle3", {"d2t": BAD_D2T + 20}, {}, "tensor d2t maps draft id 6 to target id 38, the target has 37 tokens"),
    ("eagle3", {"d2t": BAD_D2T - 1}, {}, "tensor d2t maps draft id 0 to target id -1, the target has 37 tokens"),
    ("eagle3", {"d2t": -torch.arange(D)}, {}, "tensor d2t maps two draft ids to target id 0"),
    ("eagle3", {}, {"draft_vocab_size": 38}, "draft_vocab_size=38 is above vocab_size=37"),
    ("medusa", {}, {"truncated_vocab_size": 38}, "truncated_vocab_size is 38, the target .* has 37"),
    ("medusa", {}, {"truncated_vocab_size": 3}, "tensor token_map is missing"),
    (
        "medusa",
        {"token_map": torch.tensor([1, 37])},
        {"truncated_vocab_size": 2},
        "token_map maps draft id 1 to target id 37",
    ),
    ("medusa", {"token_map": torch.arange(3)}, {"truncated_vocab_size": 2}, r"token_map has shape \[3\].*says \[2\]"),
    # counts and settings
    ("medusa", {}, {"num_heads": 3}, "num_heads is 3, the file of tensors has 2"),
    ("medusa", {}, {"num_hidden_layers": 2}, "num_hidden_layers is 2, the file of tensors has 1"),
    ("medusa", {}, {"medusa_fc_bias": True}, r"tensor blocks.0.layers.0.bias \[24\] is missing"),
    ("mlp", {}, {"top_k_tokens_per_head": [1, 2]}, "top_k_tokens_per_head has 2 entries, n_predict is 3"),
    ("mlp", {}, {"n_predict": 100}, "n_predict is 100, not a whole number from 1 to 64"),
    ("eagle3", {}, {"eagle_aux_hidden_state_layer_ids": [3, 2, 1]}, r"is \[3, 2, 1\], not ascending"),
    ("eagle3", {}, {"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4, eagle_aux_hidden_state_layer_ids has 3"),
    ("eagle3", {}, {"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True, only False is supported"),
    ("eagle3", {}, {"norm_before_residual": "yes"}, 'norm_before_residual is "yes", not true or false'),
    ("speculators", {}, {"transformer_layer_config": None}, "transformer_layer_config is absent"),
    ("eagle3", {"mask_hidden": torch.ones(1, 1, 3 * H)}, {}, "has mask_hidden, but names no mask token"),
    ("eagle3", {"mask_hidden": torch.ones(1, H)}, {"mask_token_id": 4}, rf"mask_hidden has shape \[1, {H}\]"),
    ("eagle3", {"mask_hidden": torch.ones(1, 3 * H)}, {"ptd_token_id": V}, f"ptd_token_id is {V}, not a whole number"),
    ("speculators", {}, {"speculators_model_type": "dflash2"}, "algorithm dflash2, which is not supported"),
    (
        "eagle",
        {},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "RoPE type is 'dynamic', supported are default, lin",
    ),
    ("eagle", {}, {"rope_scaling": {"type": "linear"}}, "factor is absent, not a number"),
    ("eagle3", {}, {"rope_scaling": ROPE}, "low_freq_factor 4.0, high_freq_factor 1.0"),
    ("eagle3", {}, {"layer_types": ["sliding_attention"]}, "layer_types has sliding_attention, only full_attention"),
    ("eagle", {}, {"hidden_size": -24}, "hidden_size is -24, not a whole number from 1"),
    ("eagle", {}, {"hidden_size": 10**30}, "hidden_size is 1000000000000000000000000000000, not a whole number from 1"),
    ("eagle", {}, {"num_hidden_layers": 10**6}, r"num_hidden_layers is 1000000, not a whole number from 1 to \d\d"),
    ("eagle", {}, {"head_dim": 7}, "head_dim=7 is odd"),
    ("eagle", {}, {"hidden_act": "nonsense"}, "nonsense"),
    ("eagle", {}, {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
]


@pytest.mark.parametrize("kind", GOOD)
def test_what_the_cases_start_from_is_accepted(kind: str, target: TargetWeights, tmp_path: Path) -> None:
    load, config, tensors = GOOD[kind]
    load(plain.write(tmp_path, config, tensors), target, torch.float32)


@pytest.mark.parametrize(("kind", "tensors", "settings", "message"), CASES)
def test_a_mismatch_is_refused(
    kind: str,
    tensors: dict[str, torch.Tensor | None],
    settings: dict[str, Any],
    message: str,
    target: TargetWeights,
    tmp_path: Path,
) -> None:
    load, good_config, good_tensors = GOOD[kind]
    changed = {name: found for name, found in (good_tensors | tensors).items() if found is not None}
    plain.write(tmp_path, good_config | settings, changed)
    with pytest.raises(CheckpointRefused, match=message) as caught:
        load(tmp_path, target, torch.float32)
    assert isinstance(caught.value, ConfigError), "the service answers a ConfigError with one line and status 2"
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", GOOD)
def test_a_tokenizer_of_another_size_is_refused(kind: str, target_dir: Path, tmp_path: Path) -> None:
    def tokenizer(size: int) -> str:
        added = [{"id": size - 1, "content": "<eos>"}]
        return json.dumps(
            {"model": {"vocab": {f"t{place}": place for place in range(size - 1)}}, "added_tokens": added}
        )

    theirs = plain.write(tmp_path / "target", plain.llama_config(), plain.target_tensors())
    (theirs / "tokenizer.json").write_text(tokenizer(37))
    with_tokenizer = load_target_weights(theirs, torch.float32)
    load, config, tensors = GOOD[kind]
    folder = plain.write(tmp_path / "head", config, tensors)
    (folder / "tokenizer.json").write_text(tokenizer(37))
    load(folder, with_tokenizer, torch.float32)
    (folder / "tokenizer.json").write_text(tokenizer(35))
    with pytest.raises(CheckpointRefused, match=r"tokenizer.json has 35 tokens, the target's has 37"):
        load(folder, with_tokenizer, torch.float32)
