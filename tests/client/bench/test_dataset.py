"""get_samples, which scripts written for vLLM call: a file's prompts, in a chat template or without, or random ones."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from outrider.client.bench.dataset import add_dataset_parser, get_samples
from outrider.shared.errors import ConfigError

TARGET = Path(__file__).parents[3] / "models/demo-target"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


def parsed(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_dataset_parser(parser)
    return parser.parse_args(line)


def test_a_file_is_read_from_its_start_again(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("import os", "def main():")))
    line = ("--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "3", "--custom-output-len", "9")
    samples = get_samples(parsed(*line, "--skip-chat-template"), tokenizer)
    assert [sample.prompt for sample in samples] == ["import os", "def main():", "import os"]
    assert samples[1].prompt_len == len(tokenizer("def main():", add_special_tokens=False)["input_ids"])
    assert {(sample.expected_output_len, sample.multi_modal_data) for sample in samples} == {(9, None)}
    args = parsed(*line)
    args.custom_skip_chat_template = True  # as older scripts say it
    assert get_samples(args, tokenizer) == samples
    chat = [{"role": "user", "content": "import os"}]
    [first, *_] = get_samples(parsed(*line), tokenizer)
    assert first.prompt == tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert first.prompt_len == len(tokenizer(first.prompt, add_special_tokens=False)["input_ids"])
    assert get_samples(parsed(*line, "--enable-multimodal-chat"), tokenizer)[0].prompt == chat


def test_random_prompts_are_those_of_the_seed(tokenizer: Any) -> None:
    line = ("--num-prompts", "3", "--random-input-len", "12", "--random-output-len", "5")
    samples = get_samples(parsed(*line, "--seed", "4"), tokenizer)
    assert samples == get_samples(parsed(*line, "--seed", "4"), tokenizer)
    assert samples != get_samples(parsed(*line), tokenizer)
    assert [len(str(sample.prompt).split()) for sample in samples] == [12, 12, 12]
    assert {sample.expected_output_len for sample in samples} == {5}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (("--dataset-name", "custom"), "--dataset-path: name the file"),
        (("--dataset-name", "custom", "--dataset-path", "/no/such"), "--dataset-path /no/such"),
    ],
)
def test_what_is_wrong_is_named(tokenizer: Any, line: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        get_samples(parsed(*line), tokenizer)
