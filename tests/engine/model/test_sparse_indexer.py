"""Sparse attention with an indexer, in a whole model: against transformers on a context far longer than the choice, to
the bit for every cut, in the memory that is planned for it, and what is refused. Shorter contexts, trees and company:
test_architectures, test_row_invariance.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from latent_models import LATENT_MODELS
from multimodal_models import save_minimax_m3
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.certificate import certify
from outrider.engine.errors import ModelRefused
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner

BLOCK_SIZE = 8
BLOCKS = [9, 3, 0, 5, 7, 1, 2, 4]
NAMES = ["deepseek_v32", "dots3_note_text", "glm_moe_dsa"]
TOKENS = torch.randint(3, 101, (60,), generator=torch.Generator().manual_seed(3)).tolist()


def save(name: str, folder: Path, **changes: Any) -> Path:
    config, arguments = LATENT_MODELS[name]
    return save_tiny_model(config, arguments | changes, folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each chooses 16 of up to 60 tokens, MiniMax-M3 20."""
    found = {name: save(name, tmp_path_factory.mktemp(name), index_topk=16) for name in NAMES}
    found["minimax_m3"] = tmp_path_factory.mktemp("minimax_m3")
    save_minimax_m3(found["minimax_m3"])
    return found


def new_runner(loaded: LoadedModel) -> ModelRunner:
    return ModelRunner(loaded, loaded.make_cache(10, BLOCK_SIZE))


def logits_in(runner: ModelRunner, sizes: list[int]) -> torch.Tensor:
    """All rows' logits, in chunks of these sizes."""
    found, start = [], 0
    for size in sizes:
        rows = SessionRows(TOKENS[start : start + size], start, BLOCKS, size)
        found.append(runner.forward(build_batch([rows], BLOCK_SIZE)).logits.clone())
        start += size
    return torch.cat(found)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[name], **options).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    found = logits_in(new_runner(load_model(str(folders[name]))), [60])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_blocks_of_keys_are_chosen_as_by_transformers(tmp_path: Path) -> None:
    """MiniMax-M3; without its choice the logits are others."""
    model = save_minimax_m3(tmp_path)
    expected = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    found = logits_in(new_runner(load_model(str(tmp_path), dtype="float32")), [60])
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["index_topk_blocks"] = 100
    (tmp_path / "config.json").write_text(json.dumps(config))
    dense = logits_in(new_runner(load_model(str(tmp_path), dtype="float32")), [60])
    assert torch.equal(dense[:20], found[:20])
    assert (dense[21:] - found[21:]).abs().max() > 0.01


@pytest.mark.parametrize("name", ["glm_moe_dsa", "minimax_m3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_cut_has_the_same_bits(dtype: str, name: str, folders: dict[str, Path]) -> None:
    """Chunks, steps, drafts that were verified in one forward, beside a session whose context is attended whole."""
    loaded = load_model(str(folders[name]), dtype=dtype)
    whole = logits_in(new_runner(loaded), [60])
    for sizes in ([16, 1, 1, 42], [7, 9, 30, 1, 5, 8], [1] * 60):
        assert torch.equal(logits_in(new_runner(loaded), sizes), whole)
    runner = new_runner(loaded)
    short = SessionRows(TOKENS[:8], 0, [8], 8)
    logits_in(runner, [50])
    both = runner.forward(build_batch([short, SessionRows(TOKENS[50:], 50, BLOCKS, 10)], BLOCK_SIZE)).logits
    assert torch.equal(both, torch.cat((whole[:8], whole[50:])))
    assert certify(loaded, new_runner(loaded)).holds


def test_a_long_context_is_not_attended_whole(folders: dict[str, Path], tmp_path: Path) -> None:
    """Up to the size of the choice the bits are those of a model that chooses everything; beyond, others."""
    everything = save("glm_moe_dsa", tmp_path, index_topk=2048)
    ours, theirs = (logits_in(new_runner(load_model(str(each))), [60]) for each in (folders["glm_moe_dsa"], everything))
    assert torch.equal(ours[:16], theirs[:16])
    assert (ours[17:] - theirs[17:]).abs().max() > 0.01


def test_an_indexers_keys_are_planned_allocated_and_moved(folders: dict[str, Path]) -> None:
    loaded = load_model(str(folders["glm_moe_dsa"]))
    cache = loaded.make_cache(4, BLOCK_SIZE)
    assert [shape.index_dim for shape in loaded.layer_shapes] == [20, 0, 20], "the second attends what the first chose"
    assert sorted(cache.index_keys) == [0, 2]
    per_token = sum(part.shape[-1] for layer in cache.layers for part in layer[:1])
    assert loaded.bytes_per_block(BLOCK_SIZE) == 4 * BLOCK_SIZE * (per_token + 2 * 20)
    cache.index_keys[2][1, 0, 3] = torch.arange(20)
    cache.move(torch.tensor([BLOCK_SIZE + 3]), torch.tensor([2]))
    assert torch.equal(cache.index_keys[2][0, 0, 2], torch.arange(20).float())


def test_eight_bits_are_taken_as_the_models_dtype(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_model(str(folders["glm_moe_dsa"]), kv_cache_dtype="fp8")
    assert loaded.kv_cache_name == "float32"
    assert "kv_cache_dtype=fp8 is taken as auto: its attention caches latents" in caplog.text


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"index_topk": 0}, "index_topk of its config.json is 0; it must be at least 1"),
        ({"index_topk": -3}, "index_topk of its config.json is -3"),
        ({"index_n_heads": 0}, "index_n_heads of its config.json is 0"),
        ({"index_n_heads": 10**9}, "transformers cannot load it"),
        ({"index_head_dim": 8}, "index_head_dim of its config.json is 8; it must be at least 16"),
        ({"index_head_dim": 10**9}, "transformers cannot load it"),
        ({"qk_rope_head_dim": 22}, "qk_rope_head_dim of its config.json is 22, and index_head_dim 20"),
        ({"indexer_types": ["shared", "shared", "full"]}, "require top-k indices from a previous full indexer layer"),
        ({"indexer_types": ["full"]}, "indexer_types of its config.json lists 1 of 3 layers"),
        ({"layer_types": ["indexed_attention", "strange", "indexed_attention"]}, "its config cannot be read"),
        ({"index_topk": "many"}, "Field 'index_topk' expected int"),
    ],
)
def test_hostile_configs_are_refused_by_name(
    changes: dict[str, Any], cause: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((folders["glm_moe_dsa"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "model.safetensors").symlink_to(folders["glm_moe_dsa"] / "model.safetensors")
    start = time.process_time()
    with pytest.raises(ModelRefused) as refused:
        load_model(str(tmp_path))
    assert cause in str(refused.value)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"index_topk_blocks": 0}, "index_topk_blocks of its config.json is 0; it must be at least 1"),
        ({"index_block_size": -1}, "index_block_size of its config.json is -1"),
        ({"index_local_blocks": -1}, "index_local_blocks of its config.json is -1; it must be at least 0"),
        ({"index_n_heads": 3}, "index_n_heads of its config.json is 3, which does not divide 2 key/value heads"),
        ({"index_n_heads": 10**9}, "index_n_heads of its config.json is 1000000000, which does not divide"),
        ({"index_head_dim": 8}, "index_head_dim of its config.json is 8; it must be at least 16"),
        ({"index_head_dim": 10**9}, "transformers cannot load it"),
        ({"index_block_size": 10**12, "index_topk_blocks": 10**12}, ""),
    ],
)
def test_hostile_blocks_are_refused_by_name(
    changes: dict[str, Any], cause: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((folders["minimax_m3"] / "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folders["minimax_m3"] / "model.safetensors")
    start = time.process_time()
    if not cause:  # more than any context has
        assert torch.isfinite(logits_in(new_runner(load_model(str(tmp_path))), [30, 30])).all()
        return
    with pytest.raises(ModelRefused) as refused:
        load_model(str(tmp_path))
    assert cause in str(refused.value)
    assert time.process_time() - start < 5


def test_an_indexer_that_rotates_more_than_its_keys_have_is_refused(tmp_path: Path) -> None:
    save_minimax_m3(tmp_path, index_head_dim=16)
    with pytest.raises(ModelRefused, match="an indexer rotates 20 elements of keys of 16"):
        load_model(str(tmp_path))


def test_a_choice_larger_than_any_context_is_everything(folders: dict[str, Path], tmp_path: Path) -> None:
    loaded = load_model(str(save("deepseek_v32", tmp_path, index_topk=10**12)))
    assert torch.isfinite(logits_in(new_runner(loaded), [30, 30])).all()


@pytest.mark.parametrize("part", ["wk", "weights_proj", "k_norm"])
def test_missing_tensors_are_refused_by_name(part: str, folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folders["glm_moe_dsa"] / "config.json").read_text())
    tensors = load_file(folders["glm_moe_dsa"] / "model.safetensors")
    missing = f"model.layers.2.self_attn.indexer.{part}.weight"
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelRefused, match=missing):
        load_model(str(tmp_path))


def test_an_indexer_that_chooses_otherwise_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another release of transformers may have."""
    right = modeling_glm_moe_dsa.GlmMoeDsaIndexer.forward

    def bent(self: Any, hidden_states: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        chosen: torch.Tensor = right(self, hidden_states.square(), *others, **more)
        return chosen

    monkeypatch.setattr(modeling_glm_moe_dsa.GlmMoeDsaIndexer, "forward", bent)
    with pytest.raises(ModelRefused, match="GlmMoeDsaIndexer is not the indexer that is known: it chooses other keys"):
        load_model(str(folders["glm_moe_dsa"]))


def test_without_kernels_for_it_the_device_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.engine.attention import ops
    from outrider.engine.model import load

    monkeypatch.setattr(
        load,
        "resolve_attention_ops",
        lambda *_given: ops.AttentionOps("triton", *[None] * 3),  # type: ignore[arg-type]
    )
    with pytest.raises(
        ModelRefused, match=r"chooses which tokens each token attends.*no GPU kernel computes.*device=cpu"
    ):
        load_model(str(folders["glm_moe_dsa"]))
