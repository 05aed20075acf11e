"""What becomes of each line with speculation of vLLM's recipes, and the page that says so.

python -m tests.recipes.table      (runs all lines and writes docs/recipes.md; minutes)
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import huggingface_hub.constants
import torch

from outrider.shared.draft_policy.draft_methods import WITHOUT_CHECKPOINT
from tests.hub_server import Hub, running_hub
from tests.recipes.in_one_process import Refused, Serving, checked, configs, read_line, serving
from tests.recipes.published import write_published
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/recipes.md"
_ALL: list[list[str]] = json.loads((ROOT / "tests/client/vllm_recipes.json").read_text())
LINES = [line for line in _ALL if any(word.startswith(("--spec", "-sc", "--num-spec")) for word in line)]
_REFUSED, _NOT_RUN = " | no: ", " | not run yet | | | |"
_ANSWERED: dict[str, Row] = {}
_OPTION = re.compile(r"--[\w.-]+")
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"type": "string", "enum": ["celsius"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}
_HEAD = """# vLLM's recipes with speculation

Of the lines that vLLM's project publishes in its recipes (August 2026), these have speculative decoding and no
placeholders. Each was started as printed on a tiny checkpoint with the layout of the published one (model type, tensor
names, packed weights, MTP layer or draft head), from a stand-in of the Hub, in one process on a CPU, and asked a chat
of 160 tokens at temperature 0 with speculation and without; where the line has a tool-call parser, also a forced call
of a tool. `python -m tests.recipes.table` runs them and writes this page. The published checkpoints themselves have not
been loaded.

"loaded" counts one rank: `--tensor-parallel-size` is taken and was not tried here, and a target with recurrent layers
or an indexer (marked ¹) is refused with more than one rank.

"""


@dataclass(frozen=True)
class Row:
    """What became of a line. ignored: options. refused: the reason; empty: it was loaded and asked. same: the tokens
    with speculation are those without. call: the forced call of a tool was read; None: the line has no parser.
    """

    line: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    refused: str = ""
    method: str = ""
    needs_one_rank: bool = False
    num_drafted: int = 0
    same: bool = False
    call: bool | None = None

    @property
    def is_answered(self) -> bool:
        return not self.refused and self.same and self.num_drafted > 0 and self.call is not False


def _value(line: list[str], option: str) -> str:
    return line[line.index(option) + 1] if option in line else ""


def _repos(line: list[str]) -> list[str]:
    config = _value(line, "--speculative-config")
    draft = json.loads(config).get("model") if config else None
    return list(dict.fromkeys([line[0], *([draft] if draft else [])]))


@contextmanager
def stand_in() -> Iterator[tuple[Hub, str, Path]]:
    """A Hub for this process, the URL of a Redis, and a folder."""
    constants = huggingface_hub.constants
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hub = stack.enter_context(running_hub(Hub({})))
        pattern = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        stack.enter_context(patch.object(constants, "ENDPOINT", hub.url))
        stack.enter_context(patch.object(constants, "HUGGINGFACE_CO_URL_TEMPLATE", pattern))
        stack.enter_context(patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}))
        (folder / "redis").mkdir()
        redis = stack.enter_context(RedisServer(folder / "redis"))
        yield hub, redis.url, folder


async def outcome(line: list[str], hub: Hub, redis_url: str, folder: Path) -> Row:
    """folder: an empty one."""
    parsers = _value(line, "--reasoning-parser"), _value(line, "--tool-call-parser")
    hub.repos = {}
    for number, repo in enumerate(_repos(line)):
        written = folder / str(number)
        write_published(repo, written, *parsers)
        files = {file.name: file.read_bytes() for file in written.iterdir() if file.is_file()}
        hub.repos = {**hub.repos, repo: files}
    row = Row(tuple(line))
    try:
        settings, ignored = read_line(line, folder / "run")
        row = dataclasses.replace(row, ignored=tuple(dict.fromkeys(_OPTION.findall(ignored))))
        with patch.object(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub")):
            verifier, gateway = configs(checked(settings), redis_url)
        key = json.dumps([_repos(line), *(_settings(config) for config in (verifier, gateway))])
        if key not in _ANSWERED:  # lines that differ in ignored options have the same settings
            async with serving(verifier, gateway) as served:
                _ANSWERED[key] = await _asked(served, row, has_tools=bool(parsers[1]))
        return dataclasses.replace(_ANSWERED[key], line=row.line, ignored=row.ignored)
    except Refused as refused:
        told = re.sub(rf"{re.escape(str(folder))}\S*?models--(\S+?)--(\S+?)/snapshots/\w+", r"\1/\2", str(refused))
        return dataclasses.replace(row, refused=re.sub(rf"{re.escape(str(folder.parent))}/\S*/", "", told))


def _settings(config: Any) -> dict[str, Any]:
    """A service's settings, without those that name files and addresses of this run."""
    found = dataclasses.asdict(config)
    here = ("model", "local_draft_model", "redis_url", "run_dir", "verifiers", "served_model_name", "port", "host")
    return {name: value for name, value in found.items() if name not in here}


async def _asked(served: Serving, row: Row, *, has_tools: bool) -> Row:
    messages = [{"role": "user", "content": "What is the weather?"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 160, "return_token_ids": True, "ignore_eos": True}
    on, off = await _both(served, body)
    same = _tokens(on) == _tokens(off)
    call = None
    if has_tools:
        # Room for what random weights think first; the penalty ends spaces between the tokens of JSON.
        forced = {**body, "tools": [_TOOL], "tool_choice": "required", "ignore_eos": False}
        with_drafts, without = await _both(served, forced | {"max_tokens": 600, "frequency_penalty": 2.0})
        same = same and _tokens(with_drafts) == _tokens(without)
        calls = with_drafts["choices"][0]["message"].get("tool_calls") or []
        said = [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in calls[:1]]
        call = said == [("get_weather", {"unit": "celsius"})]
    figures = on["metrics"]["speculative_decoding"]
    return dataclasses.replace(
        row,
        method=next(name for name in served.methods if name not in WITHOUT_CHECKPOINT),
        needs_one_rank=served.needs_one_rank,
        num_drafted=figures["num_draft_tokens"],
        same=same,
        call=call,
    )


async def _both(served: Serving, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer with the server's speculation, and without."""
    answers = []
    for more in ({}, {"speculation": {"method": "off"}}):
        answer = await served.client.post("/v1/chat/completions", json=body | more)
        if answer.status_code != 200:
            raise RuntimeError(answer.text)
        answers.append(answer.json())
    return answers


def _tokens(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def page_row(number: int, row: Row) -> str:
    words = _printed(row.line)
    ignored = ", ".join(f"`{option}`" for option in row.ignored)
    if row.refused:
        return f"| {number} | `{words}` | {ignored}{_REFUSED}{_cell(row.refused)} | | | |"
    call = {True: "yes", False: "**no**", None: "no parser"}[row.call]
    cells = f"{row.method} | {call} | {'yes' if row.same and row.num_drafted else '**no**'}"
    return f"| {number} | `{words}` | {ignored} | yes{'¹' if row.needs_one_rank else ''} | {cells} |"


def _cell(text: str) -> str:
    """A refusal without what depends on this machine and on the docs' other pages."""
    return text.partition("; docs/architectures.md")[0].replace("|", "\\|")


def page(rows: list[str]) -> str:
    """rows: page_row of every line."""
    answered = [row for row in rows if _REFUSED not in row and is_run(row)]
    models, served = ({row.split("`")[1].split()[0] for row in some} for some in (rows, answered))
    summary = (
        f"**{len(answered)} of {len(rows)}** lines are loaded, drafted for and answered, with the same tokens with "
        f"speculation and without; of {len(models)} models {len(served)}. "
        "The others are refused before or while they load, with the reason.\n\n"
    )
    if unrun := sum(not is_run(row) for row in rows):
        summary = summary.replace("The others", f"{unrun} have not been run yet; the others")
    head = "| | line | ignored | loaded | method | tool call | off = on |\n|---|---|---|---|---|---|---|\n"
    return _HEAD + summary + head + "".join(f"{row}\n" for row in rows)


def is_run(row: str) -> bool:
    return not row.endswith(_NOT_RUN)


def not_run(number: int, line: list[str]) -> str:
    return f"| {number} | `{_printed(line)}` | {_NOT_RUN}"


def _printed(words: Sequence[str]) -> str:
    return " ".join(f"'{word}'" if " " in word or "{" in word else word for word in words)


def rows_of_page() -> list[str]:
    return [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| \d", line)]


async def _renew(numbers: list[int]) -> None:
    rows = rows_of_page() if PAGE.is_file() else [not_run(number, line) for number, line in enumerate(LINES, 1)]
    with stand_in() as (hub, redis_url, folder):
        for number in numbers:
            own = folder / f"line-{number}"
            own.mkdir()
            row = await outcome(LINES[number - 1], hub, redis_url, own)
            rows[number - 1] = page_row(number, row)
            PAGE.write_text(page(rows), encoding="utf-8")
            print(number, row, file=sys.stderr, flush=True)


def main() -> None:
    torch.set_num_threads(1)
    numbers = [int(word) for word in sys.argv[1:]] or list(range(1, len(LINES) + 1))
    asyncio.run(_renew(numbers))


if __name__ == "__main__":
    main()
