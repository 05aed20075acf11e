"""The MTP layer of each family: read from the target's own folder it computes the published equations, or is refused.

transformers has an MTP model of its own for two families, at the layer numbers of their largest checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_layers import MtpModel

from outrider.drafting.checkpoints import mtp_layout
from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.mtp import load_mtp
from outrider.drafting.heads.mtp import MtpHead
from outrider.shared.checkpoint.mtp_layers import MTP_NAMES, count_mtp_layers
from tests.drafting.mtp_targets import FAMILIES, HIDDEN, MtpTarget, save_mtp_target, write

TOKENS = [3, 36, 0, 5, 5, 9, 17]
NUM_STEPS = 4


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MtpTarget]:
    folder = tmp_path_factory.mktemp("mtp")
    return {name: save_mtp_target(name, folder / name) for name in FAMILIES}


@pytest.fixture(params=FAMILIES)
def target(request: pytest.FixtureRequest, targets: dict[str, MtpTarget]) -> MtpTarget:
    return targets[request.param]


def load(folder: Path) -> MtpHead:
    """With the attention of transformers, over whole sequences."""
    head = load_mtp(folder, torch.float32)
    head.model.set_attn_implementation("eager")
    return head


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(head: MtpHead, token_ids: list[int], features: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return head(torch.tensor([token_ids]), features[None], torch.arange(len(token_ids))[None])[0]


def test_the_families_are_the_same_in_both_tables() -> None:
    assert MTP_NAMES.keys() == mtp_layout.FAMILIES.keys() == {family.model_type for family in FAMILIES.values()}


def test_four_steps_compute_the_published_equations(target: MtpTarget) -> None:
    """The chained feature is the layer's output after its last norm."""
    head = load(target.folder)
    assert head.feature_layers == (2,)
    tokens, features = list(TOKENS), numbers(len(TOKENS), HIDDEN)
    for _step in range(NUM_STEPS):
        found, expected = run(head, tokens, features), target.equations(tokens, features)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
        logits = target.logits(expected[-1])
        torch.testing.assert_close(head.logits(found[-1]), logits, atol=1e-4, rtol=0)
        tokens.append(int(logits.argmax()))
        features = torch.cat((features, expected[-1:]))


def test_the_targets_config_is_unchanged(target: MtpTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    read = transformers.AutoConfig.from_pretrained(target.folder)
    before = read.to_dict()
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_args, **_kwargs: read)
    head = load_mtp(target.folder, torch.float32)
    assert read.to_dict() == before
    layers = (head.model.config.num_hidden_layers, head.config.decoder.num_hidden_layers)
    assert layers == (target.family.num_blocks, 2)


def test_what_is_given_is_shared_and_not_read(target: MtpTarget) -> None:
    embedding, lm_head = torch.nn.Embedding(61, HIDDEN), torch.nn.Linear(HIDDEN, 61, bias=False)
    head = load_mtp(target.folder, torch.float32, embedding=embedding, lm_head=lm_head)
    assert (head.embed_tokens is embedding) == ("own" not in target.family.names)
    assert head.lm_head is lm_head


def test_an_embedding_and_output_head_of_its_own_are_used(targets: dict[str, MtpTarget], tmp_path: Path) -> None:
    target = targets["deepseek_v3"]
    own = {
        target.family.names["embedding"]: numbers(61, HIDDEN),
        target.family.names["lm_head"]: numbers(61, HIDDEN, seed=1),
    }
    head = load(target.rewritten(tmp_path, target.tensors | own))
    embedding, lm_head = own.values()
    assert torch.equal(head.embed_tokens.weight, embedding)
    assert torch.equal(head.lm_head.weight, lm_head)


def test_qwen3_5_has_the_fifteen_tensors_of_its_public_checkpoint(targets: dict[str, MtpTarget]) -> None:
    layer = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    attention = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    expected = {f"mtp.layers.0.{name}.weight" for name in (*layer, *(f"self_attn.{name}" for name in attention))}
    expected |= {f"mtp.{name}.weight" for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    assert set(targets["qwen3_5"].mtp_names) == expected


# ---- transformers' own MTP model ----


@pytest.mark.parametrize(("name", "num_layers"), [("glm4_moe", 46), ("deepseek_v3", 61)])
def test_it_computes_what_transformers_mtp_model_does(name: str, num_layers: int, tmp_path: Path) -> None:
    target = save_mtp_target(name, tmp_path / "few layers")
    theirs = {
        part.replace("model.layers.2.", f"model.layers.{num_layers}.") if part in target.mtp_names else part: tensor
        for part, tensor in target.tensors.items()
    }
    middle = {part: tensor for part, tensor in theirs.items() if part.startswith("model.layers.1.")}
    for layer in range(2, num_layers):
        theirs |= {part.replace(".1.", f".{layer}.", 1): tensor for part, tensor in middle.items()}
    folder = write(tmp_path / "all layers", target.config | {"num_hidden_layers": num_layers}, theirs)
    main = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    oracle = MtpModel.from_pretrained(main).eval()
    tokens, features = torch.tensor([TOKENS]), numbers(1, len(TOKENS), HIDDEN)
    head = load(folder)
    for _step in range(NUM_STEPS):
        positions = torch.arange(tokens.shape[1])[None]
        with torch.inference_mode():
            expected = oracle.forward_layer(0, features, positions, None, input_ids=tokens)
            found = head(tokens, features, positions)
            drafted = main.lm_head(expected[:, -1]).argmax(-1, keepdim=True)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        tokens, features = torch.cat((tokens, drafted), dim=1), torch.cat((features, expected[:, -1:]), dim=1)


# ---- refusals ----


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointRefused) as refused:
        load_mtp(folder, torch.float32)
    return refused.value.message


def needed(target: MtpTarget) -> list[str]:
    """Its embedding and output head may be missing: the target's are used."""
    ends = {target.family.names.get(kind) for kind in ("embedding", "lm_head", "own")}
    return [name for name in target.mtp_names if name not in ends]


def test_a_missing_tensor_is_refused_by_its_name(target: MtpTarget, tmp_path: Path) -> None:
    for number, name in enumerate(needed(target)):
        left = {part: tensor for part, tensor in target.tensors.items() if part != name}
        assert f"tensor {name} " in refusal(target.rewritten(tmp_path / str(number), left))


def test_a_tensor_of_another_shape_is_refused_by_its_name(target: MtpTarget, tmp_path: Path) -> None:
    for number, name in enumerate(target.mtp_names):
        tensor = target.tensors[name]
        changed = target.tensors | {name: torch.cat((tensor, tensor[:1]))}
        found = refusal(target.rewritten(tmp_path / str(number), changed))
        assert name in found
        assert str([tensor.shape[0] + 1, *tensor.shape[1:]]) in found


def test_a_renamed_or_further_tensor_is_refused_by_its_name(target: MtpTarget, tmp_path: Path) -> None:
    name = target.family.names["fc"]
    renamed = {part: tensor for part, tensor in target.tensors.items() if part != name}
    assert name in refusal(target.rewritten(tmp_path / "renamed", renamed | {f"{name}_": target.tensors[name]}))
    for further in (f"{target.family.layer}self_attn.q_proj.lora", f"{name}_scale_inv"):
        more = target.tensors | {further: torch.ones(2)}
        assert f"tensor {further} [2] is unexpected" in refusal(target.rewritten(tmp_path / further, more))


def test_a_quantised_layer_in_a_plain_checkpoint_is_refused_by_its_name(target: MtpTarget, tmp_path: Path) -> None:
    name = next(name for name in target.mtp_names if name.endswith(("o_proj.weight", "attention.dense.weight")))
    for dtype, shown in ((torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")):
        packed = target.tensors | {name: target.tensors[name].to(dtype)}
        found = refusal(target.rewritten(tmp_path / shown, packed))
        assert f"tensor {name} of its MTP layer is stored as {shown}, in a checkpoint that says nothing" in found


def test_a_count_without_tensors_is_refused(target: MtpTarget, tmp_path: Path) -> None:
    left = {name: tensor for name, tensor in target.tensors.items() if name not in target.mtp_names}
    found = refusal(target.rewritten(tmp_path, left))
    assert f"{target.family.count_key} of its config.json is 1, but it has no tensor of an MTP layer" in found


@pytest.mark.parametrize("count", [0, None])
def test_tensors_without_a_count_are_refused(targets: dict[str, MtpTarget], tmp_path: Path, count: int | None) -> None:
    for name, target in targets.items():
        if name in ("dots3_note", "mimo_v2_flash", "qwen3_next") and count is None:
            continue  # their config classes have no such key: the tensors say how many
        changes: dict[str, Any] = {target.family.count_key: count}
        found = refusal(target.rewritten(tmp_path / name, target.tensors, **changes))
        assert f"it has tensors of MTP layers ({target.mtp_names[0]})" in found
        assert target.family.count_key in found


def test_the_tensors_count_the_layers_of_a_config_that_does_not(targets: dict[str, MtpTarget], tmp_path: Path) -> None:
    target = targets["mimo_v2_flash"]
    second = {name.replace("layers.0", "layers.1"): target.tensors[name] for name in target.mtp_names}
    folder = target.rewritten(tmp_path, target.tensors | second, **{target.family.count_key: None})
    assert count_mtp_layers(folder) == 2
    load_mtp(folder, torch.float32)


def test_merged_experts_are_read_as_single_ones_are(targets: dict[str, MtpTarget], tmp_path: Path) -> None:
    target = targets["qwen3_5_moe"]
    experts = f"{target.family.layer}mlp.experts."
    single = [
        [target.tensors[f"{experts}{number}.{kind}_proj.weight"] for number in range(4)] for kind in ("gate", "up")
    ]
    merged = {name: tensor for name, tensor in target.tensors.items() if not name.startswith(experts)}
    merged[f"{experts}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(*single, strict=True)])
    merged[f"{experts}down_proj"] = torch.stack(
        [target.tensors[f"{experts}{number}.down_proj.weight"] for number in range(4)]
    )
    features = numbers(len(TOKENS), HIDDEN)
    found = run(load(target.rewritten(tmp_path / "merged", merged)), TOKENS, features)
    torch.testing.assert_close(found, target.equations(TOKENS, features), atol=2e-5, rtol=0)
    del merged[f"{experts}gate_up_proj"]
    assert f"tensor {experts}gate_up_proj [4, 32, 32]" in refusal(target.rewritten(tmp_path / "half", merged))


def test_later_layers_are_left_out_as_far_as_the_count_goes(targets: dict[str, MtpTarget], tmp_path: Path) -> None:
    target = targets["glm4_moe"]
    second = {name.replace("layers.2.", "layers.3."): target.tensors[name] + 1.0 for name in target.mtp_names}
    tensors = target.tensors | second
    features = numbers(len(TOKENS), HIDDEN)
    head = load(target.rewritten(tmp_path / "two", tensors, num_nextn_predict_layers=2))
    torch.testing.assert_close(run(head, TOKENS, features), target.equations(TOKENS, features), atol=2e-5, rtol=0)
    assert "model.layers.3." in refusal(target.rewritten(tmp_path / "one", tensors))


def test_a_model_type_without_mtp_layers_is_refused_with_those_that_have_them(tmp_path: Path) -> None:
    found = refusal(write(tmp_path, {"model_type": "llama", "num_hidden_layers": 2}, {"lm_head.weight": torch.ones(2)}))
    assert "none are read of model type llama" in found
    assert all(name in found for name in MTP_NAMES)


@pytest.mark.parametrize("blocks", [["linear_attention", "moe"], ["full_attention", "linear_attention"], ["mlp"]])
def test_nemotron_hs_mtp_layer_has_attention_and_nothing_recurrent(
    targets: dict[str, MtpTarget], tmp_path: Path, blocks: list[str]
) -> None:
    target = targets["nemotron_h"]
    with pytest.raises(CheckpointRefused, match=f"mtp_layers_block_type is .*{blocks[0]}.* an MTP layer has attention"):
        load_mtp(target.rewritten(tmp_path, target.tensors, mtp_layers_block_type=blocks), torch.float32)


def test_nemotron_hs_older_pattern_says_the_same_blocks(targets: dict[str, MtpTarget], tmp_path: Path) -> None:
    target = targets["nemotron_h"]
    older = {"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "*E", "num_hidden_layers": 2}
    head = load(target.rewritten(tmp_path, target.tensors, **older))
    features = numbers(len(TOKENS), HIDDEN)
    torch.testing.assert_close(run(head, TOKENS, features), target.equations(TOKENS, features), atol=2e-5, rtol=0)
