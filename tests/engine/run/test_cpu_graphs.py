"""Recorded forwards: the bits of plain ones over batches of all kinds; and models that must not be recorded."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lean_models import LEAN_MODELS
from tiny_models import SERVED, VOCAB_SIZE, save_tiny_model

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run import cpu_graphs
from outrider.engine.run.cpu_graphs import ROW_BUCKETS, RecordedForwards
from outrider.engine.run.runner import ForwardResult, ModelRunner

BLOCK_SIZE = 4
NUM_BLOCKS = 64
MAX_BLOCKS_OF_A_SESSION = 32  # 128 positions
RECORDED = ("lean_llama", "lean_qwen3", "lean_gemma2", "lean_gemma3_text", "lean_phi3", "lean_smollm3")
LEFT_ALONE = ("lean_mixtral", "lean_gpt_oss", "lean_phi", "opt")


def _load(name: str, directory: Path, dtype: str = "bfloat16") -> LoadedModel:
    save_tiny_model(*(SERVED | LEAN_MODELS)[name], directory)
    return load_model(str(directory), dtype=dtype)


class Pair:
    """A recording and a plain runner, each with a cache of its own, given the same batches."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.recording = ModelRunner(loaded, loaded.make_cache(NUM_BLOCKS, BLOCK_SIZE), graphs=True)
        self.plain = ModelRunner(loaded, loaded.make_cache(NUM_BLOCKS, BLOCK_SIZE))

    @property
    def num_recorded(self) -> int:
        graphs: Any = self.recording._graphs
        return len(graphs._recorded)

    def run(self, sessions: Sequence[SessionRows], tap_layers: Sequence[int] = ()) -> ForwardResult:
        batch = build_batch(sessions, BLOCK_SIZE)
        found, expected = (runner.forward(batch, tap_layers) for runner in (self.recording, self.plain))
        assert torch.equal(found.logits, expected.logits)
        assert found.hidden.keys() == expected.hidden.keys() == set(tap_layers)
        for layer in tap_layers:
            assert torch.equal(found.hidden[layer], expected.hidden[layer])
        for ours, theirs in zip(self.recording.cache.layers, self.plain.cache.layers, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])
        return found


def _random_sessions(generator: random.Random, shape: Sequence[int]) -> list[SessionRows]:
    """Sessions of that many rows each, at random places of disjoint blocks; some rows are trees."""
    share = min(MAX_BLOCKS_OF_A_SESSION, NUM_BLOCKS // len(shape))
    block_ids = generator.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    sessions = []
    for place, num_rows in enumerate(shape):
        blocks = block_ids[place * share : (place + 1) * share]
        context_len = generator.randrange(share * BLOCK_SIZE - num_rows)
        num_chain = generator.randint(1, num_rows)
        parents = [generator.randint(num_chain - 1, row - 1) for row in range(num_chain, num_rows)]
        token_ids = [generator.randrange(VOCAB_SIZE) for _ in range(num_rows)]
        used = blocks[: -(-(context_len + num_rows) // BLOCK_SIZE)]
        sessions.append(SessionRows(token_ids, context_len, used, num_rows, num_chain, parents))
    return sessions


def _with_some_wanted(generator: random.Random, session: SessionRows) -> SessionRows:
    """As a draft is, or as the end or the middle of a prompt."""
    num_rows = len(session.token_ids)
    return dataclasses.replace(session, num_logits_rows=generator.choice([num_rows, num_rows, num_rows, 1, 0]))


@pytest.mark.parametrize("name", RECORDED)
def test_any_batch_has_the_bits_of_a_plain_forward(name: str, tmp_path: Path) -> None:
    pair = Pair(_load(name, tmp_path / name))
    generator = random.Random(5)
    shapes = [(1,), (6,), (3, 3), (7,), (3, 2, 3), (1, 1), (9, 8, 16), (30,)]  # of 1, 2, 6, 8, 32 and 40 rows
    for _ in range(70):
        sessions = _random_sessions(generator, generator.choice(shapes))
        pair.run([_with_some_wanted(generator, session) for session in sessions])
    assert pair.num_recorded == 6


def test_heads_over_one_key_are_cut_alike(tmp_path: Path) -> None:
    """32 heads over one key are two parts of each row, in the recording as in plain forwards."""
    name, arguments = LEAN_MODELS["lean_llama"]
    save_tiny_model(name, {**arguments, "num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 32}, tmp_path)
    pair = Pair(load_model(str(tmp_path), dtype="bfloat16"))
    generator = random.Random(8)
    for _ in range(24):
        pair.run(_random_sessions(generator, generator.choice([(1,), (2,), (2, 1, 1), (1, 1, 1, 1)])))
    assert pair.num_recorded == 3


def test_linears_of_another_library_are_called_between_the_kernels(tmp_path: Path) -> None:
    pair = Pair(_load("lean_llama", tmp_path / "llama", "float32"))
    generator = random.Random(6)
    for _ in range(8):
        pair.run(_random_sessions(generator, (2, 3)))
    assert pair.num_recorded > 0


def test_taps_are_recorded_with_the_forward(tmp_path: Path) -> None:
    pair = Pair(_load("lean_llama", tmp_path / "llama"))
    generator = random.Random(7)
    for place in range(16):
        pair.run(_random_sessions(generator, (4,)), tap_layers=[(), (0, 1, 2), (2,)][place % 3])
    assert pair.num_recorded >= 3


def test_logits_are_read_where_they_are_until_the_next_forward(tmp_path: Path) -> None:
    pair = Pair(_load("lean_llama", tmp_path / "llama"))
    generator = random.Random(8)
    found = [pair.run(_random_sessions(generator, (4,))) for _ in range(5)]
    assert found[-1].logits.data_ptr() == found[-2].logits.data_ptr()


def test_the_rows_that_are_wanted_come_back(tmp_path: Path) -> None:
    """A prompt's end between sessions that draft, its middle before one: recorded with them."""
    pair = Pair(_load("lean_llama", tmp_path / "llama"))
    generator = random.Random(9)
    for _ in range(4):
        first, prompt_end, middle, last = _random_sessions(generator, (3, 9, 7, 2))
        sessions = [first, dataclasses.replace(prompt_end, num_logits_rows=1), last]
        assert pair.run(sessions).logits.shape[0] == 3 + 1 + 2
        assert pair.run([dataclasses.replace(middle, num_logits_rows=0), last]).logits.shape[0] == 2
    assert pair.num_recorded == 2


def test_only_small_batches_of_wanted_rows_are_recorded(tmp_path: Path) -> None:
    pair = Pair(_load("lean_llama", tmp_path / "llama"))
    most_rows_per_session = 32  # two query heads share a key's
    generator = random.Random(8)
    for _ in range(4):
        pair.run(_random_sessions(generator, (*[32] * (ROW_BUCKETS[-1] // 32), ROW_BUCKETS[-1] % 32 + 1)))
        pair.run(_random_sessions(generator, (most_rows_per_session + 1,)))
        prompts = _random_sessions(generator, (20, 20))
        pair.run([dataclasses.replace(prompt, num_logits_rows=1) for prompt in prompts])
        pair.run([dataclasses.replace(prompts[0], num_logits_rows=0)])
    assert pair.num_recorded == 0


@pytest.mark.parametrize("name", ["lean_llama", "lean_gemma2"])
def test_a_chain_of_many_rows_is_recorded_in_pieces(name: str, tmp_path: Path) -> None:
    """A long draft, alone and beside sessions with a short one or a tree; gemma2's layers have a window."""
    pair = Pair(_load(name, tmp_path / name))
    generator = random.Random(11)
    for _ in range(5):
        for shape in ((70,), (2, 41, 5), (1, 33, 34, 3)):
            sessions = [
                dataclasses.replace(session, num_chain_rows=None, parents=()) if len(session.token_ids) > 5 else session
                for session in _random_sessions(generator, shape)
            ]
            pair.run(sessions)
    assert pair.num_recorded == 2  # of 48 and 80 rows


def test_sizes_that_take_too_much_memory_run_as_they_are_and_the_others_stay_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_graphs, "_ARENA_BYTES", 1 << 17)
    pair = Pair(_load("lean_llama", tmp_path / "llama"))
    generator = random.Random(10)
    with caplog.at_level("INFO", logger="outrider.engine.run.cpu_graphs"):
        for _ in range(4):
            for shape in ((2,), (20, 20), (3,), (30, 30)):
                pair.run(_random_sessions(generator, shape))
    assert pair.num_recorded == 2
    assert "forwards of 40 rows or more are not recorded" in caplog.text


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_a_model_with_parts_of_its_own_runs_as_it_is(name: str, tmp_path: Path) -> None:
    runner = ModelRunner(loaded := _load(name, tmp_path / name), loaded.make_cache(4, BLOCK_SIZE), graphs=True)
    assert not runner.uses_graphs


class _Dependent(torch.nn.Module):
    """Computes something else for odd numbers, which Python reads where the dispatcher does not see it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.inner(token_ids)
        return embedded * 2 if token_ids.tolist()[0][0] % 2 else embedded


def test_a_recording_that_would_be_wrong_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = _load("lean_llama", tmp_path / "llama")
    loaded.model.model.embed_tokens = _Dependent(loaded.model.model.embed_tokens)
    pair = Pair(loaded)
    generator = random.Random(9)
    with caplog.at_level("INFO", logger="outrider.engine.run.cpu_graphs"):
        for _ in range(8):
            pair.run(_random_sessions(generator, (2,)))
    assert pair.num_recorded == 0
    assert "did not repeat the forward's bits" in caplog.text


def test_a_runner_without_graphs_records_nothing(tmp_path: Path) -> None:
    loaded = _load("lean_llama", tmp_path / "llama")
    assert isinstance(ModelRunner(loaded, loaded.make_cache(4), graphs=True)._graphs, RecordedForwards)
    assert ModelRunner(loaded, loaded.make_cache(4))._graphs is None
