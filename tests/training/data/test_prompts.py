"""Prompt files of every kind, and the built-in prompts."""

import json
from pathlib import Path

import pytest

from outrider.training.data.domains import domain_prompts
from outrider.training.data.prompts import Prompt, corpus_prompts, read_prompts
from outrider.training.errors import PromptError


def test_every_form_of_jsonl_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]
    rows = [
        "plain text",
        {"prompt": "as an object"},
        {"prompt": [3, 1, 2]},
        {"messages": chat},
        {
            "conversations": [
                {"from": "human", "value": "first"},
                {"from": "gpt", "value": "answer"},
                {"from": "human", "value": "second"},
                {"from": "gpt", "value": "to be asked for"},
            ]
        },
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    turns = ({"role": "user", "content": "first"}, {"role": "assistant", "content": "answer"})
    assert read_prompts(path) == [
        Prompt(text="plain text"),
        Prompt(text="as an object"),
        Prompt(token_ids=(3, 1, 2)),
        Prompt(messages=tuple(chat)),
        Prompt(messages=(*turns, {"role": "user", "content": "second"})),
    ]


def test_a_text_file_is_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("def f(x):\r\n\n  indented é\n".encode())
    assert read_prompts(path) == [Prompt(text="def f(x):"), Prompt(text="  indented é")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2: must be a text"),
        ('{"prompt": ""}', "line 2: prompt must be"),
        ('{"prompt": [-1]}', "line 2: prompt must be"),
        ('{"messages": []}', "line 2: messages must be"),
        ('{"messages": ["hello"]}', "line 2: every message"),
        ('{"conversations": [{"from": "robot", "value": "x"}]}', "line 2: every turn"),
        ('{"conversations": [{"from": "gpt", "value": "x"}]}', "line 2: conversations has no human turn"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"fine"\n' + line + "\n")
    with pytest.raises(PromptError, match=words):
        read_prompts(path)


def test_files_without_prompts(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    with pytest.raises(PromptError, match="has no prompts"):
        read_prompts(empty)
    with pytest.raises(PromptError, match="cannot be read"):
        read_prompts(tmp_path / "absent.txt")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    code = "import os\n" + "".join(f"def function_{i}(x):\n    return x + {i}\n\n" for i in range(60))
    words = " ".join(f"word{i}" for i in range(60))
    prose = f'"""{words}"""\n' + code
    chat = "<|user|>\nWrite a function `f` that adds<|end|>\n<|assistant|>\ndef f(): ...<|end|>\n"
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(text) + "\n" for text in (code, chat, prose)))
    return tmp_path


def test_corpus_prompts_are_beginnings_of_documents(corpus: Path) -> None:
    documents = [json.loads(line) for line in (corpus / "heldout.jsonl").read_text().splitlines()]
    prompts = corpus_prompts(corpus, "heldout", 10, seed=4)
    assert prompts == corpus_prompts(corpus, "heldout", 10, seed=4)
    chat = [prompt for prompt in prompts if prompt.is_chat]
    assert chat == [Prompt(messages=({"role": "user", "content": "Write a function `f` that adds"},))]
    texts = [prompt.text for prompt in prompts if prompt.text is not None]
    assert texts
    for text in texts:
        (document,) = [document for document in documents if document.startswith(text)]
        # The tokenizer keeps a break with the indent after it: a prompt ends before one.
        assert document[len(text)] == "\n"


def test_domains(corpus: Path, tmp_path: Path) -> None:
    name, prose = domain_prompts("prose", corpus, 5, seed=0)
    assert name == "prose"
    assert [prompt.text for prompt in prose if prompt.text and prompt.text.startswith('"""word0 word1 ')]
    assert all(prompt.is_chat for prompt in domain_prompts("chat", corpus, 5, seed=0)[1])
    assert not any(prompt.is_chat for prompt in domain_prompts("code", corpus, 5, seed=0)[1])
    own = tmp_path / "own.txt"
    own.write_text("one\ntwo\n")
    assert domain_prompts(f"mine={own}", corpus, 1, seed=0) == ("mine", [Prompt(text="one")])
    with pytest.raises(PromptError, match="must be one of code, prose, chat"):
        domain_prompts("verse", corpus, 1, seed=0)
