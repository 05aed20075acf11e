"""Claude Code and Codex themselves, headless, against Qwen2.5-Coder 0.5B: read a file, change a line, run the test.

What a model of half a billion parameters would do is left out: between agent and gateway, each turn's request gets the
tool and the arguments that are to be called, as a forced call whose schema has one value. So all that the agents send
and read is theirs and the gateway's own, and the task is done or it is not. The last turn's text has one value too.

`npm install @anthropic-ai/claude-code @openai/codex` somewhere; OUTRIDER_TEST_AGENTS names the node_modules/.bin there.
Each agent has a home of its own, a dummy key, and no address but this machine's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from e2e_real_models import QWEN_NAME, START_TIMEOUT_S
from e2e_stack import RunningStack
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.ports import server_port

pytestmark = [pytest.mark.storm, pytest.mark.timeout(3600)]
TASK = "Read calc.py, mend the line that is wrong, and run test_calc.py."
WRONG, RIGHT = "return a - b", "return a + b"
FILES = {
    "calc.py": f"def add(a, b):\n    {WRONG}\n",
    "test_calc.py": 'from calc import add\n\nassert add(2, 3) == 5\nprint("it adds")\n',
}
# The text of the last turn, in an object: an agent takes one that max_tokens cuts as an error.
LAST_WORDS = {"said": "The test passes."}
CODEX_CONFIG = """model = "{model}"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "LOCAL_KEY"
[analytics]
enabled = false
"""


def only(arguments: Mapping[str, str]) -> dict[str, Any]:
    """A schema with one value."""
    properties = {name: {"type": "string", "const": value} for name, value in arguments.items()}
    return {"type": "object", "properties": properties, "required": list(arguments), "additionalProperties": False}


@dataclass
class Prompter:
    """Stands between an agent and the gateway at `upstream`, and says what is called next."""

    upstream: str
    model: str
    speculation: Mapping[str, Any]
    calls: list[tuple[str, dict[str, str]]]
    answers: list[Any] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        if request.method == "POST":
            body = json.dumps(self._fixed(request.url.path, json.loads(body))).encode()
        async with httpx.AsyncClient(timeout=START_TIMEOUT_S) as client:
            url = f"{self.upstream}{request.url.path}"
            answer = await client.request(
                request.method, url, content=body, headers={"content-type": "application/json"}
            )
        if request.method == "POST":
            if answer.status_code != 200:
                self.refused.append(answer.text)
            self.answers.append(said(answer.text))
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    def _fixed(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        body |= {"model": self.model}
        if path.endswith("count_tokens"):
            return body
        body |= {"temperature": 0, "speculation": self.speculation}
        is_message = path.endswith("messages")
        self.results = results_in(body["messages"] if is_message else body["input"])
        tools = {tool.get("name"): tool for tool in body.get("tools", ())}
        if not tools or len(self.results) >= len(self.calls):
            form = {"type": "json_schema", "schema": only(LAST_WORDS)}
            body |= {"output_config": {"format": form}} if is_message else {"text": {"format": form | {"name": "last"}}}
            if tools:
                body["tool_choice"] = {"type": "none"} if is_message else "none"
            return body
        name, arguments = self.calls[len(self.results)]
        tools[name]["input_schema" if is_message else "parameters"] = only(arguments)
        body["tool_choice"] = {"type": "tool" if is_message else "function", "name": name}
        return body


def results_in(messages: list[dict[str, Any]]) -> list[str]:
    """Of tools, as the agent sent them."""
    found = [json.dumps(item["output"]) for item in messages if item.get("type") == "function_call_output"]
    blocks = [block for item in messages if isinstance(item.get("content"), list) for block in item["content"]]
    return found + [json.dumps(block["content"]) for block in blocks if block.get("type") == "tool_result"]


def said(text: str) -> list[Any]:
    """An answer without what differs from request to request: ids, times, figures of rounds."""
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    kept = [event.get("delta") or event.get("content_block") or event.get("type") for event in events]
    return [{n: v for n, v in one.items() if n != "id"} if isinstance(one, dict) else one for one in kept]


@contextmanager
def served(prompter: Prompter) -> Iterator[str]:
    app = Starlette(routes=[Route("/{path:path}", prompter.answer, methods=["GET", "POST", "HEAD"])])
    server = uvicorn.Server(uvicorn.Config(app, port=(port := server_port()), log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def program(name: str) -> Path:
    folder = os.environ.get("OUTRIDER_TEST_AGENTS", "")
    path = Path(folder) / name
    if not folder or not path.exists():
        pytest.skip(
            f"OUTRIDER_TEST_AGENTS names no folder with {name}: npm install @anthropic-ai/claude-code @openai/codex"
        )
    return path.resolve()


def run_claude(url: str, model: str, home: Path, work: Path) -> None:
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    tools = ("--tools", "Read,Edit,Bash", "--allowedTools", "Read Edit Bash")
    run([str(program("claude")), "-p", TASK, *tools], environment, home, work)


def run_codex(url: str, model: str, home: Path, work: Path) -> None:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(CODEX_CONFIG.format(model=model, url=url))
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    run([str(program("codex")), "exec", *options, TASK], {"LOCAL_KEY": "none"}, home, work)


def run(command: list[str], environment: dict[str, str], home: Path, work: Path) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"))
    whole = {"PATH": path, "HOME": str(home), **environment}
    done = subprocess.run(
        command, cwd=work, env=whole, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


CLAUDE_CALLS = [
    ("Read", {"file_path": "{work}/calc.py"}),
    ("Edit", {"file_path": "{work}/calc.py", "old_string": WRONG, "new_string": RIGHT}),
    ("Bash", {"command": "python3 test_calc.py"}),
]
CODEX_CALLS = [
    ("exec_command", {"cmd": "cat calc.py"}),
    ("exec_command", {"cmd": f"sed -i 's/{WRONG}/{RIGHT}/' calc.py"}),
    ("exec_command", {"cmd": "python3 test_calc.py"}),
]
AGENTS = {"claude": (run_claude, CLAUDE_CALLS), "codex": (run_codex, CODEX_CALLS)}


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_finishes_its_task(real_stack: RunningStack, tmp_path: Path, agent: str) -> None:
    """With drafts and without: the same answers, of which all but the last are calls."""
    program(agent)
    run_agent, calls = AGENTS[agent]
    answers = []
    work = tmp_path / "work"
    work.mkdir()
    for name, speculation in (("on", {"method": "ngram", "num_speculative_tokens": 6}), ("off", {"method": "off"})):
        for file, text in FILES.items():
            (work / file).write_text(text)
        home = tmp_path / f"home-{name}"
        home.mkdir()
        filled = [
            (tool, {key: value.replace("{work}", str(work)) for key, value in given.items()}) for tool, given in calls
        ]
        prompter = Prompter(real_stack.url, QWEN_NAME, speculation, filled)
        with served(prompter) as url:
            run_agent(url, QWEN_NAME, home, work)
        assert prompter.refused == []
        assert RIGHT in (work / "calc.py").read_text()
        assert len(prompter.results) == 3
        assert "it adds" in prompter.results[-1]
        answers.append(prompter.answers)
    assert answers[0] == answers[1]
