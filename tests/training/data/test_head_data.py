"""Files become windows, windows become batches: nothing lost, nothing outside the vocabulary, and again the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.training.data.head_data import BatchSource, load_windows
from outrider.training.data.tokenize_rows import RowEncoder
from outrider.training.errors import DataError, SettingError

DEMO_TARGET = Path(__file__).parents[3] / "models" / "demo-target"
VOCAB_SIZE = 50


def no_tokenizer(_row: dict[str, Any]) -> tuple[list[int], int]:
    raise AssertionError("these rows have ids")


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def windows_of(path: Path, seq_len: int = 8, count_prompts: bool = False) -> list[tuple[list[int], int]]:
    windows = load_windows([path], no_tokenizer, VOCAB_SIZE, seq_len, count_prompts)
    bounds = zip(windows.starts, windows.ends, windows.count_from, strict=True)
    return [(windows.token_ids[start:end].tolist(), int(first)) for start, end, first in bounds]


def test_samples_are_cut_into_windows_and_prompts_do_not_count(tmp_path: Path) -> None:
    ids = list(range(30))
    rows = [
        {"prompt_token_ids": ids[:11], "token_ids": ids[11:22]},
        {"prompt": ids[:2], "token_ids": ids[2:5]},
        {"prompt_token_ids": ids[:8], "token_ids": []},
        {"prompt_token_ids": ids[:1], "token_ids": ids[1:3]},
    ]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    # The first window of the first row is all prompt; the last two rows have nothing to learn, or too little.
    assert windows_of(path) == [(ids[8:16], 3), (ids[16:22], 0), (ids[:5], 2)]
    counted = windows_of(path, count_prompts=True)
    assert counted == [(ids[:8], 0), (ids[8:16], 0), (ids[16:22], 0), (ids[:5], 0), (ids[:8], 0)]


def test_npy_and_bin(tmp_path: Path) -> None:
    rows = np.arange(24, dtype=np.uint16).reshape(2, 12)
    np.save(tmp_path / "d.npy", rows)
    assert windows_of(tmp_path / "d.npy") == [
        (list(range(8)), 0), (list(range(8, 12)), 0), (list(range(12, 20)), 0), (list(range(20, 24)), 0)
    ]  # fmt: skip
    rows.tofile(tmp_path / "d.bin")
    assert windows_of(tmp_path / "d.bin") == [(list(range(start, start + 8)), 0) for start in (0, 8, 16)]


def test_text_goes_through_the_targets_tokenizer(tmp_path: Path) -> None:
    encode = RowEncoder(DEMO_TARGET)
    tokenizer = encode._load()
    code = "def f(x):\n    return x + 1\n"
    chat = [{"role": "user", "content": "Write f"}]
    rows = [
        code,
        {"text": code},
        {"prompt": "def f(x):", "completion": "\n    return x + 1\n"},
        {"messages": chat, "completion": code},
        {"conversations": [{"from": "human", "value": "Write f"}, {"from": "gpt", "value": code}]},
    ]
    windows = load_windows([write_jsonl(tmp_path / "d.jsonl", rows)], encode, 4096, 512)
    texts = [
        tokenizer.decode(windows.token_ids[start:end]) for start, end in zip(windows.starts, windows.ends, strict=True)
    ]
    rendered = "<|user|>\nWrite f<|end|>\n<|assistant|>\n"
    assert texts == [code, code, code, rendered + code, rendered + code]
    prompts = [
        tokenizer.decode(windows.token_ids[start : start + first])
        for start, first in zip(windows.starts, windows.count_from, strict=True)
    ]
    assert prompts == ["", "", "def f(x):", rendered, rendered]
    (tmp_path / "d.txt").write_text(code)
    text_windows = load_windows([tmp_path / "d.txt"], encode, 4096, 512)
    assert tokenizer.decode(text_windows.token_ids) == code


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent.jsonl", None, "does not exist"),
        ("d.csv", b"1,2", "unknown file type"),
        ("d.npy", b"not numpy", "not a .npy file"),
        ("d.jsonl", b'{"token_ids": [1, 2\n', "line 1 is not JSON"),
        ("d.jsonl", b'{"prompt": [1], "token_ids": [2, 3, 99]}\n', r"token id 99 is outside .* \[0, 50\)"),
        ("d.jsonl", b'{"prompt": [1], "token_ids": [2, 3, -1]}\n', "outside"),
        ("d.jsonl", b'{"prompt": [1], "token_ids": [2, 3, 1e3]}\n', "line 1: .* whole numbers"),
        ("d.jsonl", b'{"prompt": [1], "token_ids": [2, 3, 99999999999]}\n', "outside"),
        ("d.jsonl", b'{"prompt": [1], "token_ids": [2]}\n', "no sample of at least 4"),
        ("d.jsonl", b"", "no sample of at least 4"),
    ],
)
def test_data_that_cannot_be_used(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        load_windows([tmp_path / name], no_tokenizer, VOCAB_SIZE, 8)


def test_rows_that_the_tokenizer_cannot_help(tmp_path: Path) -> None:
    for row, words in (({"prompt": "x"}, "must have a text"), ({"conversations": [{"from": "human"}]}, "does not end")):
        with pytest.raises(DataError, match=f"line 1: .*{words}"):
            load_windows([write_jsonl(tmp_path / "d.jsonl", [row])], RowEncoder(DEMO_TARGET), 4096, 8)
    with pytest.raises(SettingError, match="no tokenizer"):
        load_windows([write_jsonl(tmp_path / "d.jsonl", ["text"])], RowEncoder(tmp_path), 4096, 8)


def ragged(tmp_path: Path, num_rows: int = 50) -> Path:
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": [row], "token_ids": rng.integers(0, 50, rng.integers(4, 20)).tolist()} for row in range(num_rows)
    ]
    return write_jsonl(tmp_path / "ragged.jsonl", rows)


def test_every_epoch_deals_every_window_once(tmp_path: Path) -> None:
    windows = load_windows([ragged(tmp_path)], no_tokenizer, VOCAB_SIZE, 32)
    source = BatchSource(windows, 4, seed=7)
    assert source.batches_per_epoch == 12
    epochs = []
    for epoch in range(2):
        seen: list[int] = []
        num_pads = 0
        for place in range(12):
            batch = source.batch(12 * epoch + place)
            assert batch.token_ids.shape == batch.counts.shape
            for ids, counts in zip(batch.token_ids.tolist(), batch.counts.tolist(), strict=True):
                length = max(index for index, flag in enumerate(counts) if flag) + 1
                assert counts == [False, *[True] * (length - 1), *[False] * (len(ids) - length)]
                num_pads += len(ids) - length
                seen.append(ids[0])
        assert max(Counter(seen).values()) == 1
        assert num_pads < 60, "batches of like lengths need little padding"
        epochs.append(seen)
    assert epochs[0] != epochs[1]
    # Any batch, asked for in any order, by another object: the same.
    again = BatchSource(windows, 4, seed=7).batch(17)
    assert again.token_ids.equal(source.batch(17).token_ids)
    assert not again.token_ids.equal(BatchSource(windows, 4, seed=8).batch(17).token_ids)
    with pytest.raises(DataError, match="50 windows do not fill one batch of 51"):
        BatchSource(windows, 51, seed=0)


def test_counts_and_fingerprint(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": [1, 1], "token_ids": [2, 3, 3]}])
    windows = load_windows([path], no_tokenizer, VOCAB_SIZE, 8)
    assert windows.token_counts(5).tolist() == [0, 0, 1, 2, 0]
    with_prompts = load_windows([path], no_tokenizer, VOCAB_SIZE, 8, count_prompts=True)
    assert with_prompts.token_counts(5).tolist() == [0, 2, 1, 2, 0]
    assert windows.fingerprint() != with_prompts.fingerprint()
    assert windows.fingerprint() == load_windows([path], no_tokenizer, VOCAB_SIZE, 8).fingerprint()
