"""Does a command of the documentation exist as it is written? Programs, targets, options, files; nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import yaml

from docs.generate.cli_page import command_tree
from docs.generate.config_page import SERVICES
from docs.generate.rest_page import openapi_document
from outrider.plugins.dynamo.options import parser as dynamo_parser
from tests.docs.blocks import ROOT

# Of other projects: shown beside ours on the pages for their users, or what everybody has.
FOREIGN = ("vllm", "llama-server", "text-generation-launcher", "git", "jq", "kill")
_SEPARATORS = {"&&", "||", "|", ";", "&"}
_COMPOSE_OPTIONS = {"--build", "-d", "--wait", "--scale", "-v", "--profile"}
_CURL_URL = re.compile(r"http://127\.0\.0\.1:8000(/[^\s'\"?]*)")


class NoSuchCommand(AssertionError):
    pass


def check_text(text: str) -> None:
    """Raises NoSuchCommand for the first command in a shell text that is not there."""
    for line in text.replace("\\\n", " ").splitlines():
        for command in _commands(line):
            check_command(command)


def check_command(words: Sequence[str]) -> None:
    program = words[0].rpartition("/")[2]
    if program in FOREIGN:
        return
    check = _CHECKS.get(program)
    if check is None:
        raise NoSuchCommand(f"{program}: no check for this program; write one in {__file__}")
    check(list(words[1:]))


def is_command(code: str) -> bool:
    """Inline code that is a command of ours, not a word of the prose."""
    return bool(re.match(r"(make|outrider|python -m|docker compose|kubectl|helm|pip install) [a-z.'\"-]", code))


@cache
def known_flags() -> frozenset[str]:
    """Every option of the services, of `outrider` and of Dynamo's worker."""
    flags = {"--help"}
    flags.update(option for action in dynamo_parser()._actions for option in action.option_strings)
    for _, config in SERVICES:
        for field in config.__dataclass_fields__:
            flags |= {f"--{field.replace('_', '-')}", f"--no-{field.replace('_', '-')}"}
    for command in command_tree().values():
        for parameter in command.params:
            flags |= {*parameter.opts, *parameter.secondary_opts}
    return frozenset(flags)


def _commands(line: str) -> list[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if word in _SEPARATORS:
            commands.append([])
        elif word in (">", ">>", "<"):
            next(words)
        else:
            commands[-1].append(word)
    # NAME=VALUE before a command, and commands of the shell itself.
    stripped = [_without_assignments(command) for command in commands]
    return [command for command in stripped if command and command[0] not in ("cd", "export", "source", ".")]


def _without_assignments(command: list[str]) -> list[str]:
    while command and re.match(r"[A-Z_]+=", command[0]):
        command = command[1:]
    return command


def _options(words: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]


def _make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        there = rf"^{name} \?=|\$\({name}\)|\(or \$\({name}\)" if is_variable else rf"^{name}:"
        if not re.search(there, makefile, re.MULTILINE):
            raise NoSuchCommand(f"make {word}: not in the Makefile")


def _outrider(words: list[str]) -> None:
    if _options(words[:1]):
        return
    if words[0] == "drafter":  # passes its arguments on
        _python(["-m", "outrider.drafter_service", *words[1:]])
        return
    tree = command_tree()
    name = words[0]
    if len(words) > 1 and f"{name} {words[1]}" in tree:
        name = f"{name} {words[1]}"
    if name not in tree:
        raise NoSuchCommand(f"outrider {name}: no such command")
    known = {option for parameter in tree[name].params for option in [*parameter.opts, *parameter.secondary_opts]}
    for option in _options(words):
        if option not in known | {"--help"}:
            raise NoSuchCommand(f"outrider {name}: no option {option}")


def _python(words: list[str]) -> None:
    if words[0] != "-m":
        if not (ROOT / words[0]).is_file():
            raise NoSuchCommand(f"python {words[0]}: no such file")
        return
    module = words[1]
    if module == "pytest":
        return
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise NoSuchCommand(f"python -m {module}: no such module")
    config = dict(SERVICES).get(module.removeprefix("outrider."))
    origin = Path(spec.origin)
    sources = origin.parent.glob("*.py") if origin.name == "__init__.py" else [origin]
    text = "\n".join(path.read_text() for path in sources)
    for option in _options(words[2:]):
        name = option.removeprefix("--").replace("-", "_")
        declared = name in config.__dataclass_fields__ if config else f'"{option}"' in text or f" {name}:" in text
        if not declared and option != "--help":
            raise NoSuchCommand(f"python -m {module}: no option {option}")


def _docker(words: list[str]) -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for place, word in enumerate(words):
        if word == "--scale" and words[place + 1].partition("=")[0] not in services:
            raise NoSuchCommand(f"docker compose --scale {words[place + 1]}: no such service")
        if word.startswith("-") and word not in _COMPOSE_OPTIONS:
            raise NoSuchCommand(f"docker compose: option {word} is unknown to this check")


def _kubectl(words: list[str]) -> None:
    for place, word in enumerate(words):
        if word in ("-f", "-k") and not (ROOT / words[place + 1]).exists():
            raise NoSuchCommand(f"kubectl {word} {words[place + 1]}: no such path")


def _helm(words: list[str]) -> None:
    for word in words:
        if word.startswith("deploy/") and not (ROOT / word / "Chart.yaml").is_file():
            raise NoSuchCommand(f"helm {word}: no such chart")


def _pip(words: list[str]) -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        wanted = re.fullmatch(r"outrider\[([\w,-]+)\]", word)
        for extra in wanted.group(1).split(",") if wanted else ():
            if extra not in extras:
                raise NoSuchCommand(f"pip install {word}: no extra {extra}")


def _curl(words: list[str]) -> None:
    paths = [re.sub(r"\{[^}]+\}", "[^/]+", path) for path in openapi_document()["paths"]]
    for word in words:
        url = _CURL_URL.match(word)
        if url and not any(re.fullmatch(path, url.group(1)) for path in paths):
            raise NoSuchCommand(f"curl {word}: no such route")


def _precommit(words: list[str]) -> None:
    if not (ROOT / ".pre-commit-config.yaml").is_file():
        raise NoSuchCommand("pre-commit: no configuration")


_CHECKS: Mapping[str, Callable[[list[str]], None]] = {
    "make": _make,
    "outrider": _outrider,
    "python": _python,
    "docker": _docker,
    "kubectl": _kubectl,
    "helm": _helm,
    "pip": _pip,
    "curl": _curl,
    "pre-commit": _precommit,
}
