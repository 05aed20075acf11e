"""How text is split before its tokens are looked for.

llama_cpp/splits.json has texts in pieces, under the names of those that split alike: texts of llama.cpp's own tests of
vocabularies and others, split by its unicode_regex_split (xllamacpp 2026.10). For kimi-k2 by the package regex with the
pattern of Kimi's own tokenizer, as quoted there: llama.cpp's function does not tell capital letters from small ones.
Not in it: white space above U+0800, which DeepSeek's pattern takes for ideographs and llama.cpp does not.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf_writer import write_gguf
from tiny_models import SERVED, save_tiny_model
from tokenizers import Tokenizer

from outrider.engine.model.gguf.folder import model_folder

_PIECES: dict[str, list[list[str]]] = json.loads(
    (Path(__file__).parent / "llama_cpp" / "splits.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize(
    ("pre", "texts"), [(pre, texts) for names, texts in _PIECES.items() for pre in names.split(",")]
)
def test_texts_are_split_as_the_file_says(tmp_path: Path, pre: str, texts: list[list[str]]) -> None:
    plain = save_tiny_model(*SERVED["llama"], tmp_path / "original")
    folder = Path(model_folder(str(write_gguf(plain, tmp_path / "model.gguf", "llama", pre=pre))))
    pre_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    assert pre_tokenizer is not None
    for pieces in texts:
        text = "".join(pieces)
        starts = [start for _, (start, _) in pre_tokenizer.pre_tokenize_str(text)]
        assert [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)] == pieces
