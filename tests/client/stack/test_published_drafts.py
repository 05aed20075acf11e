"""What is said of a draft when a target is started without one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.client.stack.commands import StackSettings
from outrider.client.stack.published_drafts import PUBLISHED_DRAFTS, unused_draft
from outrider.shared.speculative_config import parse_speculative_config

ROOT = Path(__file__).parents[3]
OFF = '{"method": "off"}'
PLAIN = StackSettings("models/demo-target", "", speculative_config=OFF)


@pytest.mark.parametrize("name", ["openai/gpt-oss-20b", "openai/gpt-oss-20b@main", "/data/GPT-OSS-20B"])
def test_a_published_head_is_named(name: str) -> None:
    draft = json.loads(unused_draft(PLAIN, name))
    assert draft["model"] == "RedHatAI/gpt-oss-20b-speculator.eagle3"
    assert parse_speculative_config(json.dumps({"method": draft["method"]})).method == "eagle3"


def test_nothing_is_said_where_a_draft_is_given_or_none_is_known() -> None:
    assert unused_draft(PLAIN, "models/demo-target") == ""
    assert unused_draft(replace(PLAIN, draft_model="models/demo-draft"), "Qwen/Qwen3-8B") == ""
    assert unused_draft(replace(PLAIN, speculative_config='{"method": "ngram"}'), "Qwen/Qwen3-8B") == ""


def test_an_mtp_layer_of_the_target_is_named_unless_it_drafts_already() -> None:
    with_layer = replace(PLAIN, model="models/demo-hybrid")
    assert json.loads(unused_draft(with_layer, "models/demo-hybrid"))["method"] == "mtp"
    assert unused_draft(replace(with_layer, speculative_config=""), "models/demo-hybrid") == ""


def test_the_docs_name_the_same_drafts() -> None:
    page = (ROOT / "docs" / "which-drafter.md").read_text(encoding="utf-8")
    models = {model for _, model, _ in PUBLISHED_DRAFTS.values()}
    assert models == set(re.findall(r'"model": "((?:RedHatAI|deepseek-ai|z-lab|google)/[^"]+)"', page))
