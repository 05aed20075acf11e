"""The tokenizer and its chat templates against transformers, which defines both."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import transformers
from gateway_script import DEMO_TARGET
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_fallback_backend, byte_fallback_tokenizer, wordpiece_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from outrider.gateway.request.chat_template import ChatTemplate
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.errors import ConfigError, InvalidRequest

# A busy machine is no failure.
UNHURRIED = settings(deadline=None)
TEXTS = [
    "",
    "Hello, world!",
    "  two spaces\n\n\ttab",
    "漢字かな交じり文",
    "👩‍👩‍👧‍👦 family, flag 🇩🇪",
    "naïve café ﬁne",
    "<|user|>\nhi<|end|>",
    "x" * 500,
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi 漢 <b>\"q\"</b> & 'x'"},
    {"role": "assistant", "content": "Hello.  "},
]


@pytest.fixture(scope="module")
def oracle() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO_TARGET)


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_as_transformers(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert token_ids == oracle.encode(text)
    for skip in (True, False):
        assert tokenizer.decode(token_ids, skip) == oracle.decode(token_ids, skip_special_tokens=skip)


def test_vocabulary_and_special_tokens(tokenizer: Tokenizer, oracle: Any) -> None:
    assert tokenizer.vocab_size == len(oracle)
    assert tokenizer.special_ids == frozenset(oracle.all_special_ids)
    assert tokenizer.special_tokens["eos_token"] == oracle.eos_token
    assert tokenizer.token_string(296) == oracle.convert_ids_to_tokens(296)
    assert tokenizer.token_string(10**9) == ""
    assert tokenizer.decode([10**9]) == ""
    assert tokenizer.token_bytes(10**9) == b""


@UNHURRIED
@given(st.text(st.characters(codec="utf-8", exclude_characters="▁")))
def test_token_bytes_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    data = b"".join(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text))
    assert data == text.encode()


@UNHURRIED
@given(st.text(st.characters(codec="utf-8", exclude_characters="▁")))
def test_token_bytes_of_byte_fallback_join_to_the_text(text: str) -> None:
    tokenizer = byte_fallback_tokenizer()
    data = b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text, add_special_tokens=False))
    assert data == (" " + text).encode() if text else data == b""


def test_a_digest_is_that_of_all_tokens() -> None:
    backend = byte_fallback_backend()
    digest = Tokenizer(backend, {}, None).digest
    assert Tokenizer(byte_fallback_backend(), {"bos_token": "<s>"}, "{{ 1 }}").digest == digest
    backend.add_special_tokens(["<one more>"])
    assert Tokenizer(backend, {}, None).digest != digest


def test_post_processor_decides_on_bos() -> None:
    tokenizer = byte_fallback_tokenizer()
    assert tokenizer.encode("Hello")[0] == 1
    assert 1 not in tokenizer.encode("Hello", add_special_tokens=False)


def test_wordpiece_has_no_bytes_per_token() -> None:
    tokenizer = wordpiece_tokenizer()
    assert not tokenizer.has_token_bytes
    assert tokenizer.token_text(2) == "play"


def test_token_text_marks_half_characters(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("👧")
    assert len(token_ids) > 1
    assert all(tokenizer.token_text(token_id) == "�" for token_id in token_ids)


# ---- chat templates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("add_generation_prompt", "continue_final"), [(True, False), (False, False), (False, True)])
def test_demo_chat_as_transformers(
    tokenizer: Tokenizer, oracle: Any, add_generation_prompt: bool, continue_final: bool
) -> None:
    ours = tokenizer.apply_chat_template(CHAT, add_generation_prompt, continue_final)
    theirs = oracle.apply_chat_template(
        CHAT,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final,
    )
    assert ours == theirs


TEMPLATES = [
    # Blocks on their own lines leave no trace (trim_blocks, lstrip_blocks).
    "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m['content'] | trim }}\n  {% endif %}\n{% endfor %}\n",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "{{ bos_token }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(found=false) %}{% for m in messages %}{% set ns.found = true %}{% endfor %}{{ ns.found }}",
    "{% if tools %}tools{% else %}none{% endif %}{{ enable_thinking }}{{ documents is none }}",
    "{% macro say(m) %}[{{ m.content }}]{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}"
    "{% if add_generation_prompt %}go{% endif %}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_templates_render_as_transformers(source: str) -> None:
    variables: dict[str, Any] = {"bos_token": "<s>", "enable_thinking": False}
    ours = ChatTemplate(source, {"bos_token": "<s>"}).render(CHAT, variables={"enable_thinking": False})
    [theirs], _ = render_jinja_template([CHAT], chat_template=source, add_generation_prompt=True, **variables)
    assert ours == theirs


@pytest.mark.parametrize("source", ["{{ messages[-1].content }}<end>", "{{ messages[-1].content | trim }}<end>"])
def test_continued_message_as_transformers(source: str) -> None:
    ours = ChatTemplate(source, {}).render(CHAT, add_generation_prompt=False, continue_final_message=True)
    [theirs], _ = render_jinja_template([CHAT], chat_template=source, continue_final_message=True)
    assert ours == theirs


def test_strftime_now_is_today() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([]) == str(datetime.now().year)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['missing'] + 'x' }}", "missing"),
        ("{{ messages[7]['content'] }}", "fit"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_template_errors_are_the_callers(source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        ChatTemplate(source, {}).render(CHAT)
    assert raised.value.param == "messages"


def test_broken_template_is_the_checkpoints_fault() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_kwargs_cannot_replace_the_messages(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ messages }}", {})
    with pytest.raises(InvalidRequest, match="must not set documents"):
        template.render(CHAT, variables={"documents": []})


SYSTEM_FIRST = """{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('It must be at the beginning.') }}{% endif %}
{{- m.role }}:{{ m.content }};{% endfor %}"""
ONE_SYSTEM = """{%- if messages[0].role == 'system' %}system:{{ messages[0].content }};{% endif %}
{%- for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }};{% endfor %}"""
ANY_SYSTEM = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
JOINED = "system:a\n\nb\n\nc;user:u;assistant:v;user:w;"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (SYSTEM_FIRST, JOINED),
        (ONE_SYSTEM, JOINED),
        (ANY_SYSTEM, "system:a;system:b;user:u;system:c;assistant:v;user:w;"),
    ],
    ids=["refuses later ones", "passes over later ones", "shows them all"],
)
def test_system_messages_that_a_template_shows_at_the_beginning_only(source: str, expected: str) -> None:
    said = (("system", "a"), ("system", "b"), ("user", "u"), ("system", "c"), ("assistant", "v"), ("user", "w"))
    messages = [{"role": role, "content": text} for role, text in said]
    template = ChatTemplate(source, {})
    assert template.render(messages, add_generation_prompt=False) == expected
    assert template.render(messages[2:3], add_generation_prompt=False) == "user:u;"
    assert template.render(messages[2:4], add_generation_prompt=False) == (
        "user:u;system:c;" if source == ANY_SYSTEM else "system:c;user:u;"
    )


@pytest.mark.parametrize("messages", [[], [{"role": "user"}]])
def test_nothing_to_continue(messages: list[dict[str, str]]) -> None:
    with pytest.raises(InvalidRequest, match="needs a last message"):
        ChatTemplate("x", {}).render(messages, continue_final_message=True)


def test_continued_message_that_the_template_drops() -> None:
    with pytest.raises(InvalidRequest, match="omits the last message"):
        ChatTemplate("x", {}).render(CHAT, continue_final_message=True)


# ---- files ------------------------------------------------------------------------------------------------------


def _checkpoint(folder: Path, config: object | None, jinja: str | None = None) -> Path:
    byte_fallback_backend().save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    return folder


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_checkpoint(tmp_path, {"chat_template": "config"}, jinja="file"))
    assert tokenizer.apply_chat_template(CHAT) == "file"


@pytest.mark.parametrize(
    "named",
    [
        [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ eos_token }}"}],
        [{"name": "only", "template": "{{ eos_token }}"}],
    ],
)
def test_named_templates(tmp_path: Path, named: object) -> None:
    config = {"chat_template": named, "eos_token": {"content": "</s>", "lstrip": False}, "bos_token": None}
    assert Tokenizer.load(_checkpoint(tmp_path, config)).apply_chat_template(CHAT) == "</s>"


@pytest.mark.parametrize("in_files", [False, True])
def test_a_template_of_its_own_for_chats_with_tools(tmp_path: Path, in_files: bool) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]
    folder = _checkpoint(tmp_path, {} if in_files else {"chat_template": named}, jinja="plain" if in_files else None)
    if in_files:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(named[1]["template"])
    tokenizer = Tokenizer.load(folder)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert (tokenizer.apply_chat_template(CHAT), tokenizer.apply_chat_template(CHAT, tools=tools)) == (
        "plain",
        "tools 1",
    )
    assert tokenizer.tool_template_source == named[1]["template"]


@pytest.mark.parametrize("config", [None, {}, {"chat_template": None}])
def test_no_template(tmp_path: Path, config: object) -> None:
    tokenizer = Tokenizer.load(_checkpoint(tmp_path, config))
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.apply_chat_template(CHAT)


def test_truncation_in_the_file_is_not_applied(tmp_path: Path) -> None:
    backend = byte_fallback_backend()
    whole = backend.encode("Hello world").ids
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("Hello world") == whole


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.load(tmp_path)
    for text, message in (
        ("{", "cannot be read as JSON"),
        ("[]", "is a JSON list, not an object"),
        ('{"chat_template": 5}', "must be text"),
    ):
        _checkpoint(tmp_path, None)
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            Tokenizer.load(tmp_path)
