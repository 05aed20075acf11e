"""Gemma 4's assistant, loaded from its published layout, computes what transformers' own assistant computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.drafting.checkpoints.assistant import load_assistant
from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.recognise import recognise
from outrider.shared.errors import ConfigError
from tests.drafting.assistants import WINDOW, Pair, save_pair

MODELS = Path(__file__).parents[3] / "models"
# name -> arguments of save_pair; as E2B and E4B, 12B, 31B, 26B-A4B
PAIRS: dict[str, dict[str, Any]] = {
    "ordered embeddings, a target whose last layers share": {
        "num_centroids": 8,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
    },
    "unified": {"kind": "gemma4_unified"},
    "values that are keys": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "a mixture": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
}


@pytest.mark.parametrize("length", [WINDOW - 3, WINDOW + 1, 3 * WINDOW])
@pytest.mark.parametrize("name", PAIRS)
def test_each_step_is_that_of_transformers(tmp_path: Path, name: str, length: int) -> None:
    pair = save_pair(tmp_path, **PAIRS[name])
    head = load_assistant(pair.assistant, pair.target, torch.float32, attn_implementation="eager")
    token_ids = torch.randint(64, (length,), generator=torch.Generator().manual_seed(length))
    hidden, shared = pair.states(token_ids)
    computed = head.keys_and_values(
        torch.cat([hidden[layer] for layer in head.feature_layers], dim=-1), torch.arange(length)
    )
    for layer_type, parts in computed.items():
        for part, wanted in zip(parts, shared[layer_type], strict=True):
            torch.testing.assert_close(part.transpose(0, 1)[None], wanted, atol=1e-5, rtol=0)
    given = {name: tuple(part.transpose(0, 1)[None] for part in parts) for name, parts in computed.items()}
    mask = torch.where(torch.arange(length) < length - WINDOW - 1, -torch.inf, 0.0)[None, None, None]
    feature, token_id, position = hidden[-1][-1], 5, torch.tensor([[length]])
    for _step in range(3):
        wanted_logits, wanted_feature = pair.step(token_id, feature, length, shared)
        with torch.inference_mode():
            found = head(
                torch.tensor([[token_id]]), feature[None, None], position, given,
                {"full_attention": None, "sliding_attention": mask},
            )[0]  # fmt: skip
            logits, feature = head.logits(found)[0], head.post_projection(found)[0]
        has_logit = logits > -torch.inf
        # transformers gives all tokens of other clusters one logit below the others.
        assert int(has_logit.sum()) == (64 if "ordered" not in name else 3 * 64 // 8)
        torch.testing.assert_close(logits[has_logit], wanted_logits[has_logit], atol=1e-4, rtol=0)
        assert (wanted_logits[~has_logit] < wanted_logits[has_logit].min()).all()
        torch.testing.assert_close(feature, wanted_feature, atol=1e-4, rtol=0)
        token_id = int(wanted_logits.argmax())


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_a_target_with_images_gives_the_same(tmp_path: Path, kind: str) -> None:
    """Its files, as published, keep the text model behind a prefix, and its config within another."""
    pair = save_pair(tmp_path, kind)
    head = load_assistant(pair.assistant, pair.target, torch.float32)
    config = json.loads((pair.target / "config.json").read_text())
    whole = {"model_type": kind, "architectures": ["Whole"], "text_config": config, "tie_word_embeddings": True}
    (pair.target / "config.json").write_text(json.dumps(whole))
    file = pair.target / "model.safetensors"
    stored = {name.replace("model.", "model.language_model.", 1): part for name, part in load_file(file).items()}
    save_file(stored | {"model.vision_tower.weight": torch.zeros(2)}, file, {"format": "pt"})
    of_whole = load_assistant(pair.assistant, pair.target, torch.float32)
    assert head.feature_layers == of_whole.feature_layers
    for name, part in of_whole.state_dict().items():
        assert torch.equal(part, head.state_dict()[name]), name


def test_it_is_recognised_by_config_and_by_tensors(tmp_path: Path) -> None:
    pair = save_pair(tmp_path)
    assert recognise(pair.assistant) == "mtp"
    file = pair.assistant / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "other", "architectures": ["Other"]}))
    assert recognise(pair.assistant) == "mtp"


def _edited(pair: Pair, *, tensors: dict[str, torch.Tensor | None] | None = None, **config: Any) -> None:
    """Changes tensors (None: removes) and config of the assistant."""
    file = pair.assistant / "model.safetensors"
    stored = load_file(file) | (tensors or {})
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, file, {"format": "pt"})
    text = json.loads((pair.assistant / "config.json").read_text())
    text["text_config"] |= config.pop("text_config", {})
    (pair.assistant / "config.json").write_text(json.dumps(text | config))


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({"backbone_hidden_size": 32}, "backbone_hidden_size is 32, the target's width is 48"),
        ({"text_config": {"vocab_size": 128}}, "vocab_size is 128, the target's is 64"),
        ({"text_config": {"head_dim": 8}}, "head_dim of sliding_attention is 8, the target's is 16"),
        ({"num_centroids": 7}, "num_centroids=7, centroid_intermediate_top_k=3 do not fit 64 tokens"),
        ({"centroid_intermediate_top_k": 9}, "num_centroids=8, centroid_intermediate_top_k=9 do not fit"),
        ({"tensors": {"pre_projection.weight": None}}, r"tensor pre_projection.weight \[32, 96\] is missing"),
        ({"tensors": {"model.norm.weight": torch.zeros(7)}}, r"model.norm.weight has shape \[7\]"),
        ({"tensors": {"model.more.weight": torch.zeros(7)}}, r"tensor model.more.weight \[7\] is unexpected"),
        ({"tensors": {"masked_embedding.token_ordering": None}}, "masked_embedding.token_ordering is missing"),
        ({"tensors": {"masked_embedding.token_ordering": torch.arange(63)}}, "has 63 tokens, its config says 64"),
        ({"tensors": {"masked_embedding.token_ordering": torch.arange(64) + 1}}, "to target id 64, the target has 64"),
        ({"tensors": {"masked_embedding.token_ordering": torch.arange(64) % 32}}, "maps two draft ids to target id 0"),
        ({"tensors": {"model.norm.weight": torch.full((32,), torch.nan)}}, "values that are not finite"),
        ({"text_config": "x"}, "its config cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, edit: dict[str, Any], says: str) -> None:
    pair = save_pair(tmp_path, num_centroids=8)
    if edit.get("text_config") == "x":
        (pair.assistant / "config.json").write_text('{"model_type": "gemma4_assistant", "text_config": "x"}')
    else:
        _edited(pair, **edit)
    with pytest.raises(CheckpointRefused, match=says):
        load_assistant(pair.assistant, pair.target, torch.float32)


def test_another_kind_of_target_is_refused(tmp_path: Path) -> None:
    pair = save_pair(tmp_path)
    with pytest.raises(ConfigError, match="backbone_hidden_size is 48"):
        load_assistant(pair.assistant, MODELS / "demo-target", torch.float32)
    _edited(pair, backbone_hidden_size=json.loads((MODELS / "demo-target" / "config.json").read_text())["hidden_size"])
    with pytest.raises(ConfigError, match="an assistant of gemma4_text, the target is llama"):
        load_assistant(pair.assistant, MODELS / "demo-target", torch.float32)
