"""The shipped tokenizer: any text comes back, nothing is added, and both readers render the same chat."""

import json
from pathlib import Path

import jinja2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from models.make import tokenizer as command
from models.make.tokenizer import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    tokenizer_config,
    train_tokenizer,
)
from outrider.training.data.chat_documents import chat_text
from outrider.training.errors import CorpusError

MODELS = Path(__file__).parents[3] / "models"
TOKENIZER = Tokenizer.from_file(str(MODELS / "demo-target" / "tokenizer.json"))


@settings(deadline=None)
@given(
    st.text()
    | st.lists(st.sampled_from(["\n", "    ", "\t", " ", "\r\n", "x", "é", "😀", "<|end|>", "1234"])).map("".join)
)
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert all(token_id < VOCAB_SIZE for token_id in ids)


def test_both_models_share_the_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (MODELS / "demo-target" / name).read_bytes() == (MODELS / "demo-draft" / name).read_bytes()
    assert json.loads((MODELS / "demo-target" / "tokenizer_config.json").read_text()) == tokenizer_config()


def test_transformers_reads_the_same_ids() -> None:
    loaded = AutoTokenizer.from_pretrained(MODELS / "demo-target")
    text = "<|user|>\nhi<|end|>\ndef f(x):\n        return  x  # naïve\n"
    assert loaded(text)["input_ids"] == TOKENIZER.encode(text).ids
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token_id == 0
    assert len(loaded) == VOCAB_SIZE


def test_nothing_is_added_and_special_ids_are_fixed() -> None:
    assert TOKENIZER.encode("").ids == []
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    for name in ("demo-target", "demo-draft"):
        generation = json.loads((MODELS / name / "generation_config.json").read_text())
        assert generation["eos_token_id"] == [0, 4]


@pytest.mark.parametrize("indent", ["    ", "        ", "            "])
def test_line_break_and_indentation_are_one_token(indent: str) -> None:
    assert TOKENIZER.encode(f"\n{indent}return").tokens[1:] == ["return"]


def test_chat_template_equals_the_training_format() -> None:
    """The same text from transformers, from bare jinja2 (the gateway's way) and from the corpus builder."""
    messages = [{"role": "user", "content": "Write it"}, {"role": "assistant", "content": "def it(): pass"}]
    loaded = AutoTokenizer.from_pretrained(MODELS / "demo-target")
    rendered = loaded.apply_chat_template(messages, tokenize=False)
    config = json.loads((MODELS / "demo-target" / "tokenizer_config.json").read_text())
    by_jinja = jinja2.Environment().from_string(config["chat_template"]).render(messages=messages)
    assert rendered == by_jinja == chat_text("Write it", "def it(): pass")


def test_chat_template_prompts_with_system_message() -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    loaded = AutoTokenizer.from_pretrained(MODELS / "demo-target")
    rendered = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\n"
    with pytest.raises(jinja2.TemplateError, match="role must be"):
        loaded.apply_chat_template([{"role": "robot", "content": "x"}], tokenize=False)
    assert "raise_exception" in CHAT_TEMPLATE


def test_training_is_deterministic() -> None:
    documents = [f"def f{i}(self):\n    return self.value_{i % 7}\n" for i in range(200)]
    first, second = (train_tokenizer(documents, vocab_size=300).to_str() for _ in range(2))
    assert first == second


def test_text_for_further_drafts_is_encoded_with_the_finished_tokenizer(tmp_path: Path) -> None:
    texts = ["def f(x):\n    return x\n", "class A:\n    pass\n"]
    for split in ("train", "heldout"):
        lines = "".join(json.dumps(text) + "\n" for text in texts)
        (tmp_path / f"{split}.jsonl").write_text(lines)
    command.main(work_dir=tmp_path, out=tmp_path / "tokenizer", model_dir=MODELS / "demo-target")
    expected = [token_id for text in texts for token_id in (*TOKENIZER.encode(text).ids, 0)]
    assert np.fromfile(tmp_path / "train.bin", dtype=np.uint16).tolist() == expected
    assert not (tmp_path / "tokenizer").exists()
    with pytest.raises(CorpusError, match="--model-dir"):
        command.main(work_dir=tmp_path, out=tmp_path, model_dir=tmp_path / "nowhere")
