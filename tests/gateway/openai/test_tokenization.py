"""/tokenizer_info says what vLLM's says, which it takes from transformers' tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from gateway_script import DEMO_TARGET, ScriptedService

from outrider.gateway.openai.tokenization import tokenizer_info
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.servers.http.app import create_app

AS_OBJECT = {
    "__type": "AddedToken",
    "content": "<|end|>",
    **dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo model's tokenizer, with the forms of entries that checkpoints have."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_TARGET / name, tmp_path / name)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    token_id = Tokenizer.load(DEMO_TARGET).control_tokens["<|end|>"]
    added = {str(token_id): {**AS_OBJECT, "special": True}}
    config |= {"pad_token": AS_OBJECT, "added_tokens_decoder": added, "model_max_length": 512, "vocab_file": "/x"}
    config["response_schema"] = {"properties": {"content": {"type": "string"}}}
    path.write_text(json.dumps(config))
    return tmp_path


def test_as_transformers(folder: Path) -> None:
    info = tokenizer_info(Tokenizer.load(folder))
    oracle: Any = transformers.AutoTokenizer.from_pretrained(folder)
    assert info["tokenizer_class"] == json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"]
    assert info["chat_template"] == oracle.chat_template
    assert info["model_max_length"] == oracle.model_max_length
    assert {name: info[name] for name in ("pad_token", "eos_token")} == {
        "pad_token": oracle.pad_token,
        "eos_token": oracle.eos_token,
    }
    [(token_id, text)] = info["added_tokens_decoder"].items()
    assert oracle.convert_ids_to_tokens(int(token_id)) == text
    assert "vocab_file" not in info
    assert info["response_schema"] == {"properties": {"content": {"type": "string"}}}


def test_a_template_that_is_set_is_shown(folder: Path) -> None:
    assert tokenizer_info(Tokenizer.load(folder, chat_template="{{ messages }}"))["chat_template"] == "{{ messages }}"


def test_a_tokenizer_without_a_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    assert tokenizer_info(Tokenizer.load(folder)) == {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize(("shown", "status"), [(True, 200), (False, 404)])
async def test_it_is_off_unless_it_is_set(service: ScriptedService, shown: bool, status: int) -> None:
    transport = httpx.ASGITransport(app=create_app(service, shows_tokenizer=shown))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.get("/tokenizer_info")
    assert answer.status_code == status
    if shown:
        assert answer.json() == tokenizer_info(service.tokenizer)
