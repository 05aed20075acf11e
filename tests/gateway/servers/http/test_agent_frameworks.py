"""What agent frameworks send and read, each as its users call it: two tools in a loop, formats, whole and streamed.

Their model is a script: it calls one tool after the other, and tells what they said. A framework that is not installed
is left out, with the reason; `pip install openai-agents litellm langchain-openai llm` has them all.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from gateway_script import Script, ScriptedService
from gateway_servers import GatewayServers, open_servers
from hermes_service import service_of

from outrider.gateway.config import GatewayConfig
from outrider.gateway.request.types import GenerationUpdate, ValidRequest

# Warnings of packages of others are not ours to mend.
pytestmark = [pytest.mark.storm, pytest.mark.filterwarnings("ignore")]
CALL = '<think>\nI ask.\n</think>\n\n<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
TURNS = (
    CALL.format("get_weather", '{"city": "Zürich"}'),
    CALL.format("get_time", '{"zone": "CET"}'),
    "<think>\nI know.\n</think>\n\nSunny, at noon.",
)
ANSWER = "Sunny, at noon."
QUESTION = "Weather and time in Zürich?"
PLACE = '{"city": "Zürich", "zone": "CET"}'


class Place(pydantic.BaseModel):
    """Where."""

    city: str
    zone: str


class TurnsService(ScriptedService):
    """Says the turn that follows as many tool results as its prompt has."""

    turns: tuple[str, ...] = TURNS

    async def generate(self, request: ValidRequest) -> AsyncGenerator[GenerationUpdate, None]:
        num_results = self.tokenizer.decode(request.prompt_token_ids).count("<|tool|>")
        self.script = Script(self.turns[num_results], 3)
        async for update in super().generate(request):
            yield update


@pytest.fixture
def service() -> TurnsService:
    plain = service_of("")
    return TurnsService(plain.tokenizer, model=plain.model)


@pytest.fixture
async def servers(service: TurnsService) -> AsyncIterator[GatewayServers]:
    async with open_servers(service, GatewayConfig(port=0, grpc_port=0, model="demo", drain_s=1.0)) as opened:
        yield opened


@pytest.fixture
def called() -> list[tuple[str, str]]:
    return []


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openai_agents(servers: GatewayServers, called: list[tuple[str, str]], api: str, streamed: bool) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    import openai

    def get_weather(city: str) -> str:
        """Weather of a city."""
        called.append(("get_weather", city))
        return "sunny"

    def get_time(zone: str) -> str:
        """Time in a zone."""
        called.append(("get_time", zone))
        return "12:00"

    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=f"{servers.url}/v1", api_key="none", max_retries=0) as client:
        kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
        tools = [agents.function_tool(get_weather), agents.function_tool(get_time)]
        agent = agents.Agent("a", instructions="Be brief.", model=kind("demo", client), tools=tools)
        if streamed:
            result = agents.Runner.run_streamed(agent, QUESTION)
            kinds = [event.type async for event in result.stream_events()]
            assert "raw_response_event" in kinds
        else:
            result = await agents.Runner.run(agent, QUESTION)
    assert called == [("get_weather", "Zürich"), ("get_time", "CET")]
    assert result.final_output == ANSWER


async def test_openai_agents_with_a_typed_output(servers: GatewayServers, service: TurnsService) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    import openai

    service.turns = (PLACE,)
    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=f"{servers.url}/v1", api_key="none", max_retries=0) as client:
        for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
            agent = agents.Agent("a", model=kind("demo", client), output_type=Place)
            result = await agents.Runner.run(agent, QUESTION)
            assert result.final_output == Place(city="Zürich", zone="CET")
            assert service.requests[-1].sampling_params.grammar is not None


LITELLM_TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {key: {"type": "string"}}}},
    }
    for name, key in (("get_weather", "city"), ("get_time", "zone"))
]


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_litellm(servers: GatewayServers, provider: str, streamed: bool) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    fields = {"model": f"{provider}/demo", "api_base": f"{servers.url}/v1", "api_key": "none", "tools": LITELLM_TOOLS}
    for name in ("get_weather", "get_time"):
        message = await _litellm_message(litellm, streamed, messages=messages, **fields)
        (call,) = message.tool_calls
        assert call.function.name == name
        assert message.reasoning_content == "I ask."
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "ok"}]
    message = await _litellm_message(litellm, streamed, messages=messages, **fields)
    assert (message.content, message.tool_calls) == (ANSWER, None)


async def _litellm_message(litellm: Any, streamed: bool, **fields: Any) -> Any:
    answer = await litellm.acompletion(**fields, stream=streamed, num_retries=0)
    if streamed:
        answer = litellm.stream_chunk_builder([chunk async for chunk in answer], messages=fields["messages"])
    return answer.choices[0].message


async def test_litellm_over_the_other_apis(servers: GatewayServers) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    tools = [{"type": "function", **tool["function"]} for tool in LITELLM_TOOLS]  # type: ignore[dict-item]
    response = await litellm.aresponses(
        model="openai/demo", input=QUESTION, api_base=f"{servers.url}/v1", api_key="none", tools=tools
    )
    assert [item.type for item in response.output] == ["reasoning", "function_call"]
    message = await litellm.anthropic.messages.acreate(
        model="anthropic/demo",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=200,
        api_base=servers.url,
        api_key="none",
        tools=[{"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}],
    )
    assert [block["type"] for block in message["content"]] == ["thinking", "tool_use"]


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
async def test_langchain_binds_tools(servers: GatewayServers, called: list[tuple[str, str]], responses: bool) -> None:
    langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def get_weather(city: str) -> str:
        """Weather of a city."""
        called.append(("get_weather", city))
        return "sunny"

    @tool
    def get_time(zone: str) -> str:
        """Time in a zone."""
        called.append(("get_time", zone))
        return "12:00"

    tools = {"get_weather": get_weather, "get_time": get_time}
    model = langchain_openai.ChatOpenAI(
        model="demo", base_url=f"{servers.url}/v1", api_key="none", max_retries=0, use_responses_api=responses
    ).bind_tools(list(tools.values()))
    for streamed in (False, True):
        messages: list[Any] = [HumanMessage(QUESTION)]
        while True:
            if streamed:
                chunks = [chunk async for chunk in model.astream(messages)]
                message: Any = chunks[0]
                for chunk in chunks[1:]:
                    message = message + chunk
                assert isinstance(message, AIMessageChunk)
            else:
                message = await model.ainvoke(messages)
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                said = tools[call["name"]].invoke(call["args"])
                messages.append(ToolMessage(said, tool_call_id=call["id"]))
        assert message.text == ANSWER
    assert called == [("get_weather", "Zürich"), ("get_time", "CET")] * 2


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_langchain_with_structured_output(servers: GatewayServers, service: TurnsService, method: str) -> None:
    langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    service.turns = (CALL.format("Place", PLACE) if method == "function_calling" else PLACE,)
    model = langchain_openai.ChatOpenAI(model="demo", base_url=f"{servers.url}/v1", api_key="none", max_retries=0)
    answer = await model.with_structured_output(Place, method=method).ainvoke("As JSON: where?")
    assert answer == Place(city="Zürich", zone="CET")
    assert service.requests[-1].sampling_params.grammar is not None


@pytest.mark.parametrize("options", [(), ("--no-stream",)], ids=["stream", "whole"])
async def test_llm_on_the_command_line(
    servers: GatewayServers, service: TurnsService, tmp_path: Path, options: tuple[str, ...]
) -> None:
    pytest.importorskip("llm", reason="llm is not installed")
    service.turns = (CALL.format("multiply", '{"x": 6, "y": 7}'), CALL.format("llm_version", "{}"), "It is 42.")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: demo\n  model_name: demo\n  api_base: {servers.url}/v1\n  supports_tools: true\n"
    )
    function = "def multiply(x: int, y: int) -> int:\n    return x * y\n"
    args = ("-m", "llm", "-m", "demo", "--functions", function, "-T", "llm_version", "--td", *options, "6 times 7?")
    env = {**os.environ, "LLM_USER_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *args, env=env, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert out.decode().strip().endswith("It is 42.")
    assert "42" in err.decode(), "--td shows what the tool said"
    assert len(service.requests) == 3
