"""Quantised weights on two ranks: packed on each, together the whole model's, certified, and as near to the exact
logits as bfloat16 weights are.

Oracle of the logits: transformers in float32 on the weights that were meant.
"""

from __future__ import annotations

import copy
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from outrider.engine.certificate import certify
from outrider.engine.errors import ModelRefused
from outrider.engine.model.coded_weights import RowInvariantCodes, code_kinds
from outrider.engine.model.load import load_model
from outrider.engine.model.local_model import local_model
from outrider.engine.model.row_invariant_modules import RowInvariantLinear
from outrider.engine.numerics import measure_numerics
from outrider.engine.run.runner import ModelRunner
from outrider.engine.tensor_parallel.leader import load_sharded
from outrider.engine.tensor_parallel.protocol import LoadSpec
from outrider.kernels.linear import cpu_code_panels
from tests.engine.batches import CachedSequence, run_step
from tests.engine.tensor_parallel.packed_shares import (
    NUM_RANKS,
    WIDTHS,
    gguf_file,
    packed_checkpoint,
    packed_share,
    weights_of,
)
from tests.engine.tensor_parallel.rank_pair import Pair, forked_ranks, load_pair

pytestmark = pytest.mark.skipif(not cpu_code_panels.supports(torch.bfloat16), reason="no bf16 panels here")
_NUM_TEXTS, _LENGTH = 8, 10
_FORMATS = [
    ("llama", "gptq-4-v1"),
    ("llama", "awq"),
    ("llama", "ct-w4a16-zeros"),
    ("llama", "ct-w8a8"),
    ("llama", "ct-nvfp4"),
    ("llama", "fp8-block"),
    ("qwen3_moe", "ct-w4a16"),
    ("mixtral", "awq"),
]
_IDS = ["-".join(each) for each in _FORMATS]
_USUAL = {"llama-ct-w4a16-zeros", "qwen3_moe-ct-w4a16"}
_SERVED = [
    pytest.param(*each, id=name, marks=() if name in _USUAL else pytest.mark.storm)
    for each, name in zip(_FORMATS, _IDS, strict=True)
]
_FILES = [("llama", "Q4_K"), ("llama", "Q5_0"), ("llama", "Q8_0"), ("mixtral", "Q4_1"), ("qwen3_moe", "MXFP4")]


@pytest.fixture(autouse=True, scope="module")
def _forked_ranks() -> Iterator[None]:
    with forked_ranks():
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def require_shares_of(path: str, most_held: float = 1.05) -> None:
    """Every rank's linears are packed; joined they are the whole model's. most_held: bytes of all ranks together,
    relative to those of the whole model."""
    whole, shares = packed_share(path, None), [packed_share(path, rank) for rank in range(NUM_RANKS)]
    for name, linear in whole.items():
        wanted, parts = weights_of(linear), [weights_of(share[name]) for share in shares]
        joined_up = "experts" in name and name.endswith(".up")  # gate's outputs, then up's
        if joined_up:
            halves = [part.chunk(2, 1) for part in parts]
            found = torch.cat([half for of_both in zip(*halves, strict=True) for half in of_both], 1)
        else:
            is_by_outputs = parts[0].shape[0] == wanted.shape[0]
            found = torch.cat(parts, 1 if is_by_outputs else 0)
        assert torch.equal(found, wanted), name
        held = [share[name].packed.nbytes for share in shares]
        assert sum(held) <= most_held * linear.packed.nbytes, name
        assert max(held) <= 0.7 * linear.packed.nbytes, name


@pytest.mark.parametrize(("architecture", "case"), _FORMATS, ids=_IDS)
def test_the_ranks_hold_the_packed_weights_between_them(tmp_path: Path, architecture: str, case: str) -> None:
    # Of blocks of 40 inputs a cut leaves ones of 8, with a scale each.
    most_held = 1.2 if case == "fp8-block" else 1.05
    require_shares_of(str(packed_checkpoint(tmp_path, architecture, case)), most_held)


@pytest.mark.parametrize(("architecture", "kind"), _FILES)
def test_the_ranks_hold_a_gguf_files_weights_between_them(tmp_path: Path, architecture: str, kind: str) -> None:
    require_shares_of(local_model(str(gguf_file(tmp_path, architecture, kind)), "model"))


def logits_of(loaded: Any, token_ids: list[int], num_rows: int) -> torch.Tensor:
    """Of every token, read num_rows at a time."""
    runner = ModelRunner(loaded, loaded.make_cache(4, 16))
    sequence = CachedSequence(token_ids, [0, 1, 2, 3])
    return torch.cat([run_step(runner, [sequence.rows(num_rows)])[0] for _ in range(0, len(token_ids), num_rows)])


def require_exact_and_near(pair: Pair, meant: Any) -> None:
    """Near in the median row of several texts: where rounding makes a router choose another expert, all rows after it
    are off."""
    certificate = certify(pair.together, ModelRunner(pair.together, pair.together.make_cache(2, 16)))
    assert certificate.holds, certificate.describe()
    texts = torch.randint(3, 97, (_NUM_TEXTS, _LENGTH), generator=torch.Generator().manual_seed(1))
    together, alone = (
        torch.stack([logits_of(loaded, text, _LENGTH) for text in texts.tolist()])
        for loaded in (pair.together, pair.alone)
    )
    for num_rows in (1, 5):  # plain decoding, and as drafts are verified
        assert torch.equal(logits_of(pair.together, texts[0].tolist(), num_rows), together[0])
    with torch.inference_mode():
        exact = meant(texts, use_cache=False).logits
        rounded = copy.deepcopy(meant).bfloat16()(texts, use_cache=False).logits
    ours, of_one, theirs = (
        (found.float() - exact).square().mean(-1).median().sqrt() for found in (together, alone, rounded)
    )
    in_integers = any(kind.endswith("a8") for kind in code_kinds(pair.together.model))
    assert ours <= (3.0 if in_integers else 1.2) * theirs
    assert ours <= 1.2 * of_one


def linears_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [part for part in model.modules() if isinstance(part, RowInvariantLinear)]


def require_packed(pair: Pair) -> None:
    assert all(isinstance(part, RowInvariantCodes) for part in linears_of(pair.together.model.model))
    assert code_kinds(pair.together.model) == code_kinds(pair.alone.model)


def meant_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "meant", attn_implementation="eager").eval()


def meant_by(file: str, folder: Path) -> Any:
    """transformers' own model in float32 with the dequantised weights, which other tests hold to the bit."""
    original = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    original.load_state_dict(load_model(file, dtype="float32", row_invariant=False).model.state_dict())
    return original


@contextmanager
def two_ranks(path: Path) -> Iterator[Pair]:
    pair = load_pair(path, "bfloat16")
    try:
        yield pair
    finally:
        pair.together.close()
    assert pair.failures.empty()


@pytest.mark.parametrize(("architecture", "case"), _SERVED)
def test_two_ranks_are_certified_and_near_the_exact_logits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str, case: str
) -> None:
    with two_ranks(packed_checkpoint(tmp_path, architecture, case)) as pair:
        require_packed(pair)
        assert "dequantises" not in caplog.text
        require_exact_and_near(pair, meant_model(tmp_path))


@pytest.mark.storm
@pytest.mark.parametrize(("architecture", "kind"), _FILES)
def test_a_gguf_file_on_two_ranks(tmp_path: Path, architecture: str, kind: str) -> None:
    file = gguf_file(tmp_path, architecture, kind)
    meant = meant_by(str(file), tmp_path / "plain")
    with two_ranks(file) as pair:
        require_packed(pair)
        require_exact_and_near(pair, meant)
        assert "/tp2/" in measure_numerics(pair.together, tensor_parallel_size=2)


def test_a_tied_head_is_a_share_of_its_embedding(tmp_path: Path) -> None:
    """With biases too, of which those of summed outputs count once."""
    weights, widths = r"(_proj|embed_tokens)\.weight$", {**WIDTHS, "vocab_size": 256}
    folder = packed_checkpoint(tmp_path, "llama_tied", "ct-w8a8", weights, widths)
    with two_ranks(folder) as pair:
        head = pair.together.model.get_output_embeddings().inner
        embedding = pair.together.model.get_input_embeddings().weight
        assert (head.packed.num_outputs, embedding.packed.num_outputs) == (128, 256)
        assert head.packed.parts is embedding.packed.parts
        require_exact_and_near(pair, meant_model(tmp_path))


@pytest.mark.storm
def test_latents_of_packed_weights(tmp_path: Path) -> None:
    weights = r"(q_b|kv_b|o|gate|up|down)_proj\.weight$"
    with two_ranks(
        packed_checkpoint(tmp_path, "deepseek_v3", "ct-w8a8", weights, {"moe_intermediate_size": 64})
    ) as pair:
        assert all(shape.values_in_keys for shape in pair.together.layer_shapes)
        require_exact_and_near(pair, meant_model(tmp_path))


def test_a_weight_with_scattered_groups_is_dequantised_where_its_inputs_are_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with two_ranks(packed_checkpoint(tmp_path, "llama", "gptq-4-v2-act-order")) as pair:
        # Queries, keys and values in different orders, as on one rank, and what sums over ranks.
        assert not any(isinstance(part, RowInvariantCodes) for part in linears_of(pair.together.model.model))
        assert "rank 0 dequantises 4 packed weights" in caplog.text
        assert "model.layers.1.self_attn.o_proj.weight" in caplog.text
        require_exact_and_near(pair, meant_model(tmp_path))


@pytest.mark.storm  # rank 1 waits for the check of the whole model, and is killed after 5 s
def test_a_damaged_weight_is_refused_by_name_and_ends_every_rank(tmp_path: Path) -> None:
    folder = packed_checkpoint(tmp_path, "llama", "gptq-4-v1")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.scales"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    failures: queue.Queue[str] = queue.Queue()
    with pytest.raises(ModelRefused, match=r"layers\.1\.mlp\.down_proj\.weight: it has values that are not finite"):
        load_sharded(LoadSpec(str(folder), "bfloat16", "cpu", "auto", None, 2), NUM_RANKS, on_failure=failures.put)
    assert failures.empty()
