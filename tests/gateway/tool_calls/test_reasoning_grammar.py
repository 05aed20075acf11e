"""A grammar on a model that reasons holds for the answer, and leaves the reasoning alone."""

from __future__ import annotations

import pytest
from tool_tokenizers import EOS, TEMPLATE, accepts, backend_of, compiler_of, tokenizer_of

from outrider.gateway.openai.convert import prepare_chat
from outrider.gateway.openai.schema import ChatCompletionRequest, parse_body
from outrider.gateway.request.served import RequestLimits, Served, ServedModel
from outrider.gateway.tool_calls.formats import REASONING
from outrider.gateway.tool_calls.reasoning import ReasoningState, behind_reasoning, reasoning_state
from outrider.shared.sampling_params import Grammar, GrammarKind

THINK = ("<think>", "</think>")
GRAMMARS = {
    "json_schema": (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "required": ["a%b"]}'), '{"a%b": 1}', "{}"),
    "json_object": (Grammar(GrammarKind.JSON_OBJECT, ""), "{}", "[]"),
    "regex": (Grammar(GrammarKind.REGEX, r"a/b|c\/d|\n"), "c/d", "c|d"),
    "choice": (Grammar(GrammarKind.CHOICE, '["yes", "ü\\n"]'), "ü\n", "no"),
    "lark": (Grammar(GrammarKind.LARK, 'start: x x\nx: "b" | "c"'), "bc", "b"),
}


@pytest.mark.parametrize("special", [THINK, ()], ids=["tokens", "text"])
@pytest.mark.parametrize("kind", GRAMMARS)
def test_it_holds_from_the_end_of_the_reasoning_on(kind: str, special: tuple[str, ...]) -> None:
    asked, right, wrong = GRAMMARS[kind]
    row, ids = REASONING["qwen3"], tokenizer_of(special).control_tokens
    opened = behind_reasoning(asked, row, ReasoningState.OPEN, ids)
    assert accepts(opened, special, f"Let me think: {{[.</think>\n\n{right}")
    assert not accepts(opened, special, f"Let me think.</think>\n\n{wrong}")
    assert not accepts(opened, special, right)
    unknown = behind_reasoning(asked, row, ReasoningState.UNKNOWN, ids)
    assert accepts(unknown, special, f"<think>\nHm.\n</think>\n\n{right}")
    assert accepts(unknown, special, right)
    assert not accepts(unknown, special, f"<think>Hm.</think>{wrong}")
    assert not accepts(unknown, special, f"Hm. {right}")
    assert behind_reasoning(asked, row, ReasoningState.CLOSED, ids) == asked


def test_harmony_answers_in_the_final_channel() -> None:
    special = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
    row, ids = REASONING["openai_gptoss"], tokenizer_of(special).control_tokens
    grammar = behind_reasoning(Grammar(GrammarKind.JSON_OBJECT, ""), row, ReasoningState.UNKNOWN, ids)
    final = "<|channel|>final<|message|>{}"
    assert accepts(grammar, special, final)
    assert accepts(grammar, special, f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{final}")
    assert not accepts(grammar, special, "{}")


def test_the_mask_is_a_function_of_the_path_at_every_draft_position() -> None:
    """Wherever a draft stops, before, inside or behind the end of the reasoning, going back changes no mask."""
    special = THINK
    backend, ids = backend_of(special), tokenizer_of(special).control_tokens
    grammar = behind_reasoning(GRAMMARS["json_object"][0], REASONING["qwen3"], ReasoningState.OPEN, ids)
    state = compiler_of(special).compile(grammar)
    path = backend.encode('Hm </think>\n{"a": 1}', add_special_tokens=False).ids
    fresh = [compiler_of(special).compile(grammar).allowed(path[:end]) for end in range(len(path) + 1)]
    for start in range(len(path)):
        for end in range(start, len(path) + 1):
            state.allowed(path[:end])
            assert (state.allowed(path[:start]) == fresh[start]).all()
    assert [bool(mask[backend.token_to_id(EOS)]) for mask in (fresh[0], fresh[-1])] == [False, True]


@pytest.mark.parametrize(
    ("prompt", "continued", "state"),
    [
        ("<|user|><think><|assistant|>", None, ReasoningState.UNKNOWN),
        ("<|user|>hi<|assistant|><think>\n", None, ReasoningState.OPEN),
        ("<|user|>hi<|assistant|><think>\n\n</think>\n\n", None, ReasoningState.CLOSED),
        ("<|user|>hi<|assistant|></think>", None, ReasoningState.CLOSED),
        ("<|user|>hi<|assistant|><think>so", "<think>so", ReasoningState.OPEN),
        ("<|user|><think><|assistant|>so", "so", ReasoningState.CLOSED),
        ("<|user|>hi<|assistant|><think>a</think>so", "<think>a</think>so", ReasoningState.CLOSED),
    ],
)
def test_the_prompt_says_where_the_output_begins(prompt: str, continued: str | None, state: ReasoningState) -> None:
    assert reasoning_state(REASONING["qwen3"], prompt, continued) is state


def test_response_format_of_a_chat_leaves_the_reasoning_free() -> None:
    template = (
        TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    )
    model = ServedModel("demo", 4096, 400, reasoning_parser="qwen3")
    served = Served(model, tokenizer_of(THINK, template), RequestLimits())
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_object"}}

    def grammar_of(**further: object) -> Grammar:
        prepared = prepare_chat(parse_body(ChatCompletionRequest, {**body, **further}), served)
        grammar = prepared.requests[0].sampling_params.grammar
        assert grammar is not None
        return grammar

    assert accepts(grammar_of(), THINK, "<think>First {</think>{}")
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert grammar_of(**off) == Grammar(GrammarKind.JSON_OBJECT, "")
