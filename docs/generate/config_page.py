"""reference/config.md: every setting of the three services, from their frozen configs."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from docs.generate.markdown import cell, code, table
from outrider.drafter_service.config import DrafterConfig
from outrider.gateway.config import GatewayConfig
from outrider.shared.config import ENV_PREFIX
from outrider.verifier_service.config import VerifierConfig

SERVICES: tuple[tuple[str, type[Any]], ...] = (
    ("gateway", GatewayConfig),
    ("verifier_service", VerifierConfig),
    ("drafter_service", DrafterConfig),
)
_KINDS = {
    "str": "text",
    "int": "whole number",
    "int | None": "auto or whole number",
    "float": "number",
    "bool": "true or false",
    "bool | None": "auto, true or false",
    "tuple[str, ...]": "comma-separated list",
}
_INTRODUCTION = """# Settings of the services

Every setting is a flag and an environment variable: `--kv-cache-mb 1024` and `OUTRIDER_KV_CACHE_MB=1024` say the same,
and the flag wins. A switch is turned on by `true` (`--protect-metrics true`) and off by `--no-` and its name. A wrong
value ends the process with exit code 2 and names the setting. This page is made from the services' own declarations;
`--help` of each prints the same.
"""


def config_page() -> str:
    return _INTRODUCTION + "".join(_service(module, config) for module, config in SERVICES)


def _service(module: str, config: type[Any]) -> str:
    types = get_type_hints(config)
    rows = []
    for field in dataclasses.fields(config):
        kind = types[field.name]
        name = getattr(kind, "__name__", "") if isinstance(kind, type) and "[" not in str(kind) else str(kind)
        rows.append(
            [
                f"{code('--' + field.name.replace('_', '-'))}<br>{code(ENV_PREFIX + field.name.upper())}",
                _default(field.default),
                cell(field.metadata["help"]) + _limits(field.metadata, _KINDS[name]),
            ]
        )
    heading = f"\n## {module}\n\n`python -m outrider.{module} --help`\n\n"
    return heading + table(("setting", "default", "what it does"), rows)


def _default(value: object) -> str:
    if value is None:
        return "auto"
    if isinstance(value, tuple):
        value = ",".join(value)
    return code(value).lower() if isinstance(value, bool) else code(value) or "none"


def _limits(metadata: Any, kind: str) -> str:
    if metadata["choices"]:
        return " One of " + ", ".join(code(choice) for choice in metadata["choices"]) + "."
    smallest, largest = metadata["minimum"], metadata["maximum"]
    limits = [f"at least {smallest:g}"] if smallest is not None else []
    limits += [f"at most {largest:g}"] if largest is not None else []
    return f" ({', '.join([kind, *limits])})" if kind != "text" else ""
