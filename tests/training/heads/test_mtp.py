"""A target's MTP layer is trained as it is served, and written where it is found again.

Oracles: the published equations, written out by hand (tests/drafting/mtp_targets.py), and transformers' own MTP model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel
from typer.testing import CliRunner

from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.mtp import load_mtp
from outrider.training.commands.app import app
from outrider.training.errors import SettingError
from outrider.training.frozen_target import FrozenTarget
from outrider.training.head_trainer import noise_generator
from outrider.training.heads.interface import Batch
from outrider.training.heads.mtp import MtpObjective, build_mtp
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.unroll import EVAL_DEPTHS
from tests.drafting.mtp_targets import FAMILIES as ALL_FAMILIES
from tests.drafting.mtp_targets import MtpTarget, save_mtp_target, write
from tests.training.tiny import TOKENIZER_DIR

ONLY_READ = (
    *("bailing_hybrid", "deepseek_v32", "dots3_note", "exaone_moe", "glm_moe_dsa", "glm_ocr", "mimo_v2_flash"),
    *("nemotron_h", "step3p7"),
)
FAMILIES = [name for name in ALL_FAMILIES if name not in ONLY_READ]
VOCAB_SIZE, NUM_ROWS, LENGTH, TTT_STEPS = 61, 2, 9, 3
COUNTS = np.ones(VOCAB_SIZE, dtype=np.int64)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MtpTarget]:
    folder = tmp_path_factory.mktemp("mtp")
    return {name: save_mtp_target(name, folder / name) for name in FAMILIES}


@pytest.fixture(params=FAMILIES)
def target(request: pytest.FixtureRequest, targets: dict[str, MtpTarget]) -> MtpTarget:
    return targets[request.param]


def objective_of(folder: Path, **options: Any) -> MtpObjective:
    torch.manual_seed(3)
    return build_mtp(HeadOptions(**{"ttt_steps": TTT_STEPS, **options}), FrozenTarget(folder, torch.float32))


def without_layer(target: MtpTarget, folder: Path, **config: Any) -> Path:
    left = {name: tensor for name, tensor in target.tensors.items() if name not in target.mtp_names}
    return target.rewritten(folder, left, **config)


def batch_of(num_rows: int = NUM_ROWS, length: int = LENGTH) -> Batch:
    """Row b counts from token b on."""
    token_ids = torch.randint(0, VOCAB_SIZE, (num_rows, length), generator=torch.Generator().manual_seed(3))
    counts = torch.arange(length).expand(num_rows, -1) >= torch.arange(num_rows)[:, None]
    return Batch(token_ids, counts)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """By safetensors alone, as the index says; no name is in two files."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {file.name for file in folder.glob("*.safetensors")}
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118  (not a dict)
                assert name not in found
                assert index[name] == file.name
                found[name] = shard.get_tensor(name)
    assert found.keys() == index.keys()
    return found


def same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


@pytest.mark.parametrize("name", ONLY_READ)
def test_a_layer_that_could_not_be_written_is_not_trained(name: str, tmp_path: Path) -> None:
    target = save_mtp_target(name, tmp_path / name)
    with pytest.raises(CheckpointRefused, match="drafted with, but not trained or written here"):
        objective_of(target.folder)


# ---- the objective ----


def served_logits(target: MtpTarget, tokens: list[int], features: torch.Tensor, num_steps: int) -> torch.Tensor:
    """The last of `num_steps` steps from the last of `features`, each over the whole sequence so far."""
    for _step in range(num_steps):
        rows = len(features)
        features = torch.cat((features, target.equations(tokens[1 : rows + 1], features)[-1:]))
    return target.logits(features[-1])


@pytest.mark.parametrize("is_training", [True, False])
def test_it_is_trained_as_it_is_served(target: MtpTarget, is_training: bool) -> None:
    objective, frozen = objective_of(target.folder), FrozenTarget(target.folder, torch.float32)
    objective.train(is_training)
    batch = batch_of()
    view = frozen.view(batch.token_ids, objective.feature_layers)
    loss, scores = objective(batch, view, noise_generator(0, 0, 0))
    num_steps = TTT_STEPS if is_training else EVAL_DEPTHS
    assert len(scores.agreement) == num_steps
    expected = 0.0
    for depth in range(num_steps):
        losses, overlap = [], 0.0
        for row in range(NUM_ROWS):
            for position in range(LENGTH - 2 - depth):
                if not batch.counts[row, position + 2 + depth]:
                    continue
                tokens = batch.token_ids[row].tolist()
                draft = served_logits(target, tokens, view.features[row, : position + 1], depth + 1)
                law = view.read_out(view.final[row, position + 1 + depth][None])[0].softmax(-1)
                losses.append(-(law * draft.log_softmax(-1)).sum().item())
                overlap += torch.minimum(draft.softmax(-1), law).sum().item()
        expected += 0.8**depth * float(np.mean(losses))
        assert scores.overlap[depth].item() == pytest.approx(overlap, rel=2e-3)
    assert loss.item() == pytest.approx(expected, rel=1e-3)


# The loss of layers that are there already is tested in every family above; tuning them is so in one, else a storm.
@pytest.mark.parametrize(
    ("target", "is_new"),
    [(name, True) for name in FAMILIES]
    + [pytest.param(name, False, marks=() if name == "glm4_moe" else pytest.mark.storm) for name in FAMILIES],
    indirect=["target"],
)
def test_it_can_be_learnt_and_the_target_stays(target: MtpTarget, tmp_path: Path, is_new: bool) -> None:
    folder = without_layer(target, tmp_path) if is_new else target.folder
    objective, frozen = objective_of(folder), FrozenTarget(folder, torch.float32)
    before = {name: tensor.clone() for name, tensor in frozen.model.state_dict().items()}
    batch = batch_of(8, 24)
    view = frozen.view(batch.token_ids, objective.feature_layers)
    optimizer = torch.optim.AdamW([each for each in objective.parameters() if each.requires_grad], lr=5e-3)
    first = objective.eval()(batch, view, noise_generator(0, 0, 0))[1].means()["overlap"]
    for _step in range(40):
        objective.train()(batch, view, noise_generator(0, 0, 0))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    last = objective.eval()(batch, view, noise_generator(0, 0, 0))[1].means()["overlap"]
    assert min(np.subtract(last, first)[:TTT_STEPS]) > 0.05
    assert same_tensors(before, dict(frozen.model.state_dict()))


# ---- the written checkpoint ----


@pytest.mark.parametrize("is_new", [True, False])
def test_what_is_written_is_read_again(target: MtpTarget, tmp_path: Path, is_new: bool) -> None:
    """Names are those of the fixture, which are written by hand; the target's own tensors are as they were."""
    count_key = target.family.count_key
    folder = without_layer(target, tmp_path / "bare", **{count_key: 0}) if is_new else target.folder
    objective, out = objective_of(folder), tmp_path / "out"
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    objective.export(out, torch.float32, "a name")
    found = tensors_in(out)
    assert found.keys() == target.tensors.keys()
    own = {name: tensor for name, tensor in found.items() if name not in target.mtp_names}
    assert same_tensors(own, {name: target.tensors[name] for name in own})
    assert json.loads((out / "config.json").read_text()) == target.config | {count_key: 1}
    head = load_mtp(out, torch.float32)
    assert same_tensors(dict(head.state_dict()), dict(objective.head.state_dict()))
    # By their equations: what was written, under the published names, is what was trained.
    read_again = MtpTarget(target.family, out, target.config, found, layer_of(target, out))
    batch, frozen = batch_of(), FrozenTarget(folder, torch.float32)
    view = frozen.view(batch.token_ids, objective.feature_layers)
    tokens = batch.token_ids[0].tolist()
    expected = served_logits(read_again, tokens, view.features[0, :4], 1)
    objective.head.model.set_attn_implementation("eager")
    with torch.inference_mode():
        states = objective.head(torch.tensor([tokens[1:5]]), view.features[:1, :4], torch.arange(4)[None])
        torch.testing.assert_close(objective.head.logits(states)[0, -1], expected, atol=2e-4, rtol=0)


def layer_of(target: MtpTarget, folder: Path) -> Any:
    """transformers' model of the fixture, its last layer read from a written folder by transformers."""
    deeper = folder.with_name("deeper")
    last = f"model.layers.{target.config['num_hidden_layers']}."
    renamed = {
        last + name.removeprefix(target.family.layer) if name.startswith(target.family.layer) else name: tensor
        for name, tensor in tensors_in(folder).items()
        if name not in target.family.names.values()
    }
    write(deeper, target.deeper.config.to_dict(), renamed)
    model, loading = type(target.deeper).from_pretrained(
        deeper, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not loading["missing_keys"]
    return model.eval()


def test_the_target_is_served_as_before(target: MtpTarget, tmp_path: Path) -> None:
    """By transformers, which leaves the layer out."""
    objective_of(target.folder).export(tmp_path, torch.bfloat16, "a name")
    tokens = batch_of().token_ids
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (target.folder, tmp_path)
    )
    with torch.inference_mode():
        assert torch.equal(before(input_ids=tokens).logits, after(input_ids=tokens).logits)


def test_transformers_mtp_model_finds_the_layer(targets: dict[str, MtpTarget], tmp_path: Path) -> None:
    """It looks for it after 46 layers alone."""
    target = targets["glm4_moe"]
    middle = {name: tensor for name, tensor in target.tensors.items() if name.startswith("model.layers.1.")}
    whole = {name: tensor for name, tensor in target.tensors.items() if name not in target.mtp_names}
    for layer in range(2, 46):
        whole |= {name.replace(".1.", f".{layer}.", 1): tensor for name, tensor in middle.items()}
    folder = write(tmp_path / "target", target.config | {"num_hidden_layers": 46}, whole)
    objective = objective_of(folder)
    objective.export(tmp_path / "out", torch.float32, "a name")
    main = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    )
    tokens, features = batch_of().token_ids, torch.randn(NUM_ROWS, LENGTH, 32)
    positions = torch.arange(LENGTH)[None]
    objective.head.model.set_attn_implementation("eager")
    with torch.inference_mode():
        oracle = MtpModel.from_pretrained(main).eval()
        expected = oracle.forward_layer(0, features, positions, None, input_ids=tokens)
        torch.testing.assert_close(objective.head(tokens, features, positions), expected, atol=1e-6, rtol=0)


def test_only_shards_with_an_earlier_layer_are_written_again(targets: dict[str, MtpTarget], tmp_path: Path) -> None:
    target = targets["qwen3_5"]
    names = sorted(target.tensors)
    shards = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
    assert not set(names[:4]) & set(target.mtp_names)
    folder = tmp_path / "sharded"
    shutil.copytree(target.folder, folder)
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for file, held in shards.items():
        save_file({name: whole[name] for name in held}, folder / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("of the target")
    written = {file: (folder / file).read_bytes() for file in shards}
    for _again in range(2):
        objective_of(folder).export(tmp_path / "out", torch.float32, "a name")
        assert same_tensors(tensors_in(tmp_path / "out"), target.tensors)
    linked = [(tmp_path / "out" / file).samefile(folder / file) for file in shards]
    assert linked == [True, False]
    assert written == {file: (folder / file).read_bytes() for file in shards}
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert not (tmp_path / "out" / "README.md").exists()


def test_what_was_written_is_a_target_to_tune(targets: dict[str, MtpTarget], tmp_path: Path) -> None:
    """DeepSeek's layout, whose copies of embedding and output head stay in the layer's shard."""
    target = targets["deepseek_v3"]
    objective_of(without_layer(target, tmp_path / "bare")).export(tmp_path / "once", torch.float32, "a name")
    tuned = objective_of(tmp_path / "once")
    with torch.no_grad():
        tuned.head.fc.weight.add_(1.0)
    tuned.export(tmp_path / "twice", torch.float32, "a name")
    once, twice = tensors_in(tmp_path / "once"), tensors_in(tmp_path / "twice")
    name = target.family.names["fc"]
    assert torch.equal(twice.pop(name), once.pop(name) + 1.0)
    assert same_tensors(once, twice)


def test_a_run_ends_in_a_target_with_its_layer_and_goes_on_where_it_stopped(
    targets: dict[str, MtpTarget], tmp_path: Path
) -> None:
    folder = without_layer(targets["qwen3_5"], tmp_path / "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER_DIR / name, folder)
    rows = np.tile(np.random.default_rng(1).integers(0, VOCAB_SIZE, (32, 5)), (1, 5))
    np.save(tmp_path / "data.npy", rows.astype(np.uint16))

    def command(output: str, steps: int) -> None:
        arguments = ["train", "--method", "mtp", "--target", str(folder), "--data", str(tmp_path / "data.npy")]
        sizes = ["--steps", "6", "--batch-size", "4", "--seq-len", "24", "--checkpoint-every", str(steps)]
        more = ["--output", str(tmp_path / output), "--resume", "--ttt-steps", "2", "--optimizer", "muon"]
        done = CliRunner().invoke(app, [*arguments, *sizes, *more, "--threads", "1"])
        assert done.exit_code == 0, (done.output, done.exception)

    command("whole", 6)
    command("cut", 3)
    shutil.rmtree(tmp_path / "cut" / "model")
    shutil.rmtree(tmp_path / "cut" / "checkpoint-00000006")
    command("cut", 3)
    model = tmp_path / "cut" / "model"
    assert same_tensors(tensors_in(model), tensors_in(tmp_path / "whole" / "model"))
    assert load_mtp(model, torch.bfloat16).fc.weight.dtype == torch.bfloat16
    arguments = ["export", "--run", str(tmp_path / "cut"), "--target", str(folder), "--output", str(tmp_path / "wide")]
    assert CliRunner().invoke(app, [*arguments, "--dtype", "float32"]).exit_code == 0
    wide, narrow = tensors_in(tmp_path / "wide"), tensors_in(model)
    assert wide["mtp.fc.weight"].dtype == torch.float32
    assert torch.equal(wide["mtp.fc.weight"].bfloat16(), narrow["mtp.fc.weight"])


# ---- refusals ----


def test_targets_that_take_no_layer(targets: dict[str, MtpTarget], tmp_path: Path) -> None:
    target = targets["qwen3_5"]
    llama = write(
        tmp_path / "llama", {"model_type": "llama", "num_hidden_layers": 2}, {"lm_head.weight": torch.ones(2)}
    )
    denied = target.rewritten(tmp_path / "denied", target.tensors, mtp_num_hidden_layers=0)
    frozen = FrozenTarget(target.folder, torch.float32)
    for folder, words in (
        (llama, "none are read of model type llama"),
        (denied, "mtp_num_hidden_layers of its config"),
    ):
        frozen.path = folder
        with pytest.raises(SettingError, match=words):
            build_mtp(HeadOptions(), frozen)
    packed = target.rewritten(tmp_path / "packed", target.tensors, quantization_config={"quant_method": "fp8"})
    frozen.path = packed
    with pytest.raises(CheckpointRefused, match="it is quantised"):
        build_mtp(HeadOptions(), frozen)


def test_folders_that_cannot_be_written(targets: dict[str, MtpTarget], tmp_path: Path) -> None:
    target = targets["qwen3_5"]
    objective = objective_of(target.folder)
    with pytest.raises(CheckpointRefused, match="it is the target itself"):
        objective.export(target.folder, torch.float32, "a name")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointRefused, match="which would be read alone"):
        objective.export(tmp_path, torch.float32, "a name")
