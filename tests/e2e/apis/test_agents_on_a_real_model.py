"""openai, anthropic and agent frameworks, unchanged, against Qwen2.5-Coder 0.5B: two tools in a loop, formats, streams.

Each loop's first call, a single one, is forced, and the rest is the model's own choice. So the tests ask for what the
protocol promises: the tool that was called gets arguments of its schema, its result is taken, and the loop ends. What
the model did of its own accord is printed. A package that is not installed is left out, with the reason: `pip install
openai-agents litellm langchain-openai llm` has them all.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest
from e2e_real_models import QWEN_NAME, START_TIMEOUT_S
from e2e_stack import RunningStack

# Warnings of packages of others are not ours to mend.
pytestmark = [pytest.mark.storm, pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore")]
QUESTION = "What is the weather in Paris?"
MAX_TOKENS = 96
MAX_TURNS = 3
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])


class Place(pydantic.BaseModel):
    """Where."""

    city: Literal["Paris", "London"]
    is_capital: bool


class Tools:
    """What the frameworks are given; they read names, types and docstrings."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def get_weather(self, city: str) -> str:
        """Weather of a city."""
        assert isinstance(city, str)
        self.ran.append("get_weather")
        return f"It is sunny in {city}."

    def multiply(self, x: int, y: int) -> str:
        """Product of two numbers."""
        assert isinstance(x, int)
        assert isinstance(y, int)
        self.ran.append("multiply")
        return str(x * y)

    def run(self, name: str, arguments: str) -> str:
        """As a caller does that reads what the model wrote, which nothing but a forced call holds to a schema."""
        functions = {"get_weather": self.get_weather, "multiply": self.multiply}
        try:
            return functions[name](**json.loads(arguments))
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            return f"error: {error!r}"


@pytest.fixture
def tools() -> Tools:
    return Tools()


@pytest.fixture
def url(real_stack: RunningStack) -> str:
    return f"{real_stack.url}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", timeout=START_TIMEOUT_S, max_retries=0) as client:
        yield client


def function(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(types), "additionalProperties": False}
    return {"name": name, "description": name.replace("_", " "), "parameters": schema}


FUNCTIONS = [function("get_weather", city="string"), function("multiply", x="integer", y="integer")]
CHAT_TOOLS: list[Any] = [{"type": "function", "function": entry} for entry in FUNCTIONS]
RESPONSES_TOOLS: list[Any] = [{"type": "function", **entry} for entry in FUNCTIONS]
ANTHROPIC_TOOLS: list[Any] = [
    {"name": entry["name"], "description": entry["description"], "input_schema": entry["parameters"]}
    for entry in FUNCTIONS
]


def streamed_choice(client: openai.OpenAI, asked: dict[str, Any]) -> Any:
    kinds = set()
    with client.chat.completions.stream(**asked) as stream:
        try:
            for event in stream:
                kinds.add(event.type)
            choice = stream.get_final_completion().choices[0]
        except openai.LengthFinishReasonError as error:  # which the package raises where tools are parsed
            return error.completion.choices[0]
    assert ("tool_calls.function.arguments.done" in kinds) == bool(choice.message.tool_calls)
    return choice


@STREAMED
def test_openai_chat(client: openai.OpenAI, tools: Tools, streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for turn in range(MAX_TURNS):
        asked: dict[str, Any] = {
            "model": QWEN_NAME,
            "messages": messages,
            "tools": CHAT_TOOLS,
            "tool_choice": "auto" if turn else "required",
            "parallel_tool_calls": False,
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        if streamed:
            choice: Any = streamed_choice(client, asked)
        else:
            choice = client.chat.completions.create(**asked).choices[0]
        messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not choice.message.tool_calls:
            assert choice.message.content
            break
        for call in choice.message.tool_calls:
            said = tools.run(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    assert tools.ran
    print(tools.ran, messages[-1]["content"])


def test_openai_parses_formats_and_strict_tools(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": QWEN_NAME, "messages": [{"role": "user", "content": "Where is the Louvre?"}]}
    answer = client.chat.completions.parse(**asked, temperature=0, max_tokens=MAX_TOKENS, response_format=Place)
    print(answer.choices[0].message.parsed)
    assert isinstance(answer.choices[0].message.parsed, Place)
    forced = client.chat.completions.parse(
        **asked,
        temperature=0,
        max_tokens=MAX_TOKENS,
        tools=[openai.pydantic_function_tool(Place)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call, *_) = forced.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Place)
    response = client.responses.parse(
        model=QWEN_NAME, input="Where is the Louvre?", temperature=0, max_output_tokens=MAX_TOKENS, text_format=Place
    )
    assert isinstance(response.output_parsed, Place)


@STREAMED
def test_openai_responses(client: openai.OpenAI, tools: Tools, streamed: bool) -> None:
    items: Any = QUESTION
    previous: Any = openai.omit
    for turn in range(MAX_TURNS):
        asked: dict[str, Any] = {
            "model": QWEN_NAME,
            "input": items,
            "previous_response_id": previous,
            "tools": RESPONSES_TOOLS,
            "tool_choice": "auto" if turn else "required",
            "parallel_tool_calls": False,
            "temperature": 0,
            "max_output_tokens": MAX_TOKENS,
        }
        if streamed:
            with client.responses.stream(**asked) as stream:
                *_, last = stream
            assert last.type in ("response.completed", "response.incomplete")
            response: Any = last.response
        else:
            response = client.responses.create(**asked)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        previous = response.id
        items = [
            {"type": "function_call_output", "call_id": call.call_id, "output": tools.run(call.name, call.arguments)}
            for call in calls
        ]
    assert tools.ran
    print(tools.ran, response.output_text)


@STREAMED
def test_anthropic(real_stack: RunningStack, tools: Tools, streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with anthropic.Anthropic(base_url=real_stack.url, api_key="none", timeout=START_TIMEOUT_S, max_retries=0) as client:
        for turn in range(MAX_TURNS):
            asked: dict[str, Any] = {
                "model": QWEN_NAME,
                "max_tokens": MAX_TOKENS,
                "messages": messages,
                "tools": ANTHROPIC_TOOLS,
                "tool_choice": {"type": "auto" if turn else "any", "disable_parallel_tool_use": True},
                "extra_body": {"temperature": 0},
            }
            if streamed:
                with client.messages.stream(**asked) as stream:
                    message: Any = stream.get_final_message()
            else:
                message = client.messages.create(**asked)
            messages.append({"role": "assistant", "content": message.content})
            uses = [block for block in message.content if block.type == "tool_use"]
            assert message.stop_reason in (("tool_use", "max_tokens") if uses else ("end_turn", "max_tokens"))
            if not uses:
                break
            results = [
                {"type": "tool_result", "tool_use_id": use.id, "content": tools.run(use.name, json.dumps(use.input))}
                for use in uses
            ]
            messages.append({"role": "user", "content": results})
    assert tools.ran
    print(tools.ran, message.content)


@STREAMED
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openai_agents(url: str, tools: Tools, api: str, streamed: bool) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=START_TIMEOUT_S, max_retries=0) as client:
        kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
        agent = agents.Agent(
            "a",
            instructions="Be brief.",
            model=kind(QWEN_NAME, client),
            # Its tools are strict; the first turn is forced, the ones that follow are free.
            tools=[agents.function_tool(tools.get_weather), agents.function_tool(tools.multiply)],
            model_settings=agents.ModelSettings(
                temperature=0, max_tokens=MAX_TOKENS, tool_choice="required", parallel_tool_calls=False
            ),
        )
        try:
            if streamed:
                result = agents.Runner.run_streamed(agent, QUESTION, max_turns=MAX_TURNS)
                kinds = {event.type async for event in result.stream_events()}
                assert "raw_response_event" in kinds
            else:
                result = await agents.Runner.run(agent, QUESTION, max_turns=MAX_TURNS)
            print(tools.ran, result.final_output)
            assert result.final_output
        except agents.MaxTurnsExceeded:
            print(tools.ran, "and so on")
    assert tools.ran


@STREAMED
async def test_litellm(url: str, tools: Tools, streamed: bool) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for turn in range(MAX_TURNS):
        answer = await litellm.acompletion(
            model=f"hosted_vllm/{QWEN_NAME}",
            api_base=url,
            api_key="none",
            messages=messages,
            tools=CHAT_TOOLS,
            tool_choice="auto" if turn else "required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=MAX_TOKENS,
            stream=streamed,
            num_retries=0,
            timeout=START_TIMEOUT_S,
        )
        if streamed:
            answer = litellm.stream_chunk_builder([chunk async for chunk in answer], messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            said = tools.run(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    assert tools.ran
    print(tools.ran, messages[-1]["content"])


def chat_openai(url: str, **fields: Any) -> Any:
    langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    settings: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "max_retries": 0,
        "timeout": START_TIMEOUT_S,
    }
    return langchain_openai.ChatOpenAI(model=QWEN_NAME, base_url=url, api_key="none", **settings, **fields)


@STREAMED
@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
async def test_langchain_binds_tools(url: str, tools: Tools, responses: bool, streamed: bool) -> None:
    model = chat_openai(url, use_responses_api=responses)
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    bound = [tool(tools.get_weather), tool(tools.multiply)]
    messages: list[Any] = [HumanMessage(QUESTION)]
    for turn in range(MAX_TURNS):
        asking = model.bind_tools(bound, tool_choice="auto" if turn else "any", parallel_tool_calls=False)
        if streamed:
            message: Any = None
            async for chunk in asking.astream(messages):
                message = chunk if message is None else message + chunk
        else:
            message = await asking.ainvoke(messages)
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append(ToolMessage(tools.run(call["name"], json.dumps(call["args"])), tool_call_id=call["id"]))
    assert tools.ran
    print(tools.ran, messages[-1].content)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_langchain_with_structured_output(url: str, method: str) -> None:
    model = chat_openai(url).with_structured_output(Place, method=method)
    assert isinstance(await model.ainvoke("Where is the Louvre?"), Place)


@pytest.mark.parametrize("options", [(), ("--no-stream",)], ids=["stream", "whole"])
async def test_llm_on_the_command_line(url: str, tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("llm", reason="llm is not installed")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: real\n  model_name: {QWEN_NAME}\n  api_base: {url}\n  supports_tools: true\n"
    )
    tools = "def multiply(x: int, y: int) -> int:\n    '''Product of two numbers.'''\n    return x * y\n"
    args = ("-m", "llm", "-m", "real", "-o", "temperature", "0", "-o", "max_tokens", str(MAX_TOKENS), *options)
    chain = ("--functions", tools, "-T", "llm_version", "--td", "--cl", str(MAX_TURNS), "Call multiply: 6 times 7?")
    # The package that brings SmolLM2's weights is a plugin of `llm`, which would load it with what it needs.
    own = {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *args, *chain, env={**os.environ, **own}, stdout=pipe, stderr=pipe
    )
    out, err = await process.communicate()
    print(out.decode(), err.decode())
    # `llm` has no way to force a call. Behind one it fails where its chain is too long, or where MAX_TOKENS
    # cuts another one's arguments.
    assert process.returncode == 0 or "Tool call: multiply(" in err.decode(), err.decode()
