"""Files of recorded hidden states: found by their texts, and refused by name when they are not what they should be."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from outrider.drafting.recorded_states import RecordedSession, RecordedStates, next_path, recorded_layers, write_states
from outrider.shared.errors import ConfigError

LAYERS, WIDTH, WEIGHTS = (2, 5, 8), 4, "abcd"


def session(length: int, seed: int) -> RecordedSession:
    rng = np.random.default_rng(seed)
    rows = torch.from_numpy(rng.standard_normal((length, len(LAYERS) * WIDTH))).to(torch.bfloat16)
    return RecordedSession(rng.integers(0, 1000, length).astype(np.int32), rows)


def text(*token_ids: int) -> npt.NDArray[np.int32]:
    return np.array(token_ids, dtype=np.int32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_states(next_path(tmp_path), [session(5, 1), session(7, 2)], LAYERS, WEIGHTS)
    write_states(next_path(tmp_path), [session(6, 3)], LAYERS, WEIGHTS)
    (tmp_path / "states-000003.part").write_bytes(b"of a writer that was killed")
    return tmp_path


def test_a_file_is_safetensors_of_the_described_layout(folder: Path) -> None:
    assert sorted(path.name for path in folder.glob("*.safetensors")) == [
        "states-000001.safetensors", "states-000002.safetensors"
    ]  # fmt: skip
    tensors = load_file(folder / "states-000001.safetensors")
    assert tensors["lengths"].tolist() == [5, 7]
    assert tensors["token_ids"].tolist() == [*session(5, 1).token_ids, *session(7, 2).token_ids]
    assert torch.equal(tensors["rows"], torch.cat([session(5, 1).rows, session(7, 2).rows]))
    with safe_open(folder / "states-000001.safetensors", "pt") as file:
        assert file.metadata() == {"layers": "2,5,8", "weights": WEIGHTS}


def test_a_text_is_found_with_its_last_token_or_without(folder: Path) -> None:
    recorded = RecordedStates(folder, WEIGHTS)
    assert recorded.layers == LAYERS
    for length, seed in ((5, 1), (7, 2), (6, 3)):
        known = session(length, seed)
        for wanted in (known.token_ids, np.append(known.token_ids, 77).astype(np.int32)):
            place = recorded.find(wanted)
            assert place is not None
            assert torch.equal(recorded.read(place, 0, length), known.rows)
            assert torch.equal(recorded.read(place, 2, 4), known.rows[2:4])
    place = recorded.find(session(7, 2).token_ids)
    assert place is not None
    past_the_end = recorded.read(place, 5, 8)  # the next session's rows are not this one's
    assert torch.equal(past_the_end[:2], session(7, 2).rows[5:])
    assert not past_the_end[2].any()
    assert recorded.find(session(7, 2).token_ids[:5]) is None
    assert recorded.find(text(1, 2, 3)) is None


def test_many_sessions_that_begin_alike_are_found_in_time_linear_in_their_number(tmp_path: Path) -> None:
    prompt = list(range(64))
    sessions = [
        RecordedSession(text(*prompt, number, number), torch.zeros(66, 3, dtype=torch.bfloat16))
        for number in range(20_000)
    ]
    write_states(next_path(tmp_path), sessions, LAYERS, WEIGHTS)
    began = time.process_time()
    recorded = RecordedStates(tmp_path, WEIGHTS)
    assert all(recorded.find(each.token_ids) is not None for each in sessions)
    assert time.process_time() - began < 3.0  # 0.3 s; compared one by one they would take minutes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lengths": torch.tensor([5, 6])}, "its lengths disagree; remove it"),
        ({"lengths": torch.tensor([-1, 13])}, "wrong types; remove it"),
        ({"token_ids": torch.zeros(12)}, "wrong types; remove it"),
        ({"rows": torch.zeros(11, 12)}, "its lengths disagree; remove it"),
        ({"rows": None}, "is no file of recorded hidden states"),
        ({"weights": "other"}, "was recorded with another target's weights; record again, or remove it"),
        ({"layers": "1,5,8"}, r"has hidden layers \[2, 5, 8\], other files \[1, 5, 8\]"),
        ({"layers": "1,x"}, "is no file of recorded hidden states"),
    ],
)
def test_a_wrong_file_is_refused_by_name(folder: Path, change: dict[str, object], words: str) -> None:
    path = folder / "states-000001.safetensors"
    tensors = {name: change.get(name, tensor) for name, tensor in load_file(path).items()}
    metadata = {"layers": "2,5,8", "weights": WEIGHTS} | {k: str(v) for k, v in change.items() if k not in tensors}
    save_file({name: each for name, each in tensors.items() if isinstance(each, torch.Tensor)}, path, metadata)
    with pytest.raises(ConfigError, match=f"states-00000[12].safetensors.*{words}"):
        RecordedStates(folder, WEIGHTS)


def test_a_damaged_file_is_refused_by_name(folder: Path) -> None:
    path = folder / "states-000002.safetensors"
    whole = path.read_bytes()
    for damaged in (b"", whole[:40], whole[:-3], b"\xff" * 200):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"states-000002\.safetensors is no file of recorded hidden states"):
            RecordedStates(folder, WEIGHTS)
    path.unlink()
    (folder / "states-000001.safetensors").unlink()
    with pytest.raises(ConfigError, match="--record-hidden-states"):
        RecordedStates(folder, WEIGHTS)


def test_layers_of_shallow_and_deep_targets() -> None:
    assert recorded_layers(24) == (2, 12, 21, 24)
    assert recorded_layers(6) == (2, 3, 6)
