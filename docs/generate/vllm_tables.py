"""The tables of coming-from-vllm.md: what becomes of each of vLLM's names is found by asking our own code, so that
they cannot say what the code does not do.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from docs.generate.cli_page import command_tree
from docs.generate.config_page import SERVICES
from docs.generate.markdown import cell, code, table
from docs.generate.metrics_page import registries
from docs.generate.rest_page import openapi_document
from docs.generate.vllm_names import (
    BOTH,
    CHAT,
    COMPLETIONS,
    ENDPOINTS,
    LLM_ARGUMENTS,
    METRICS,
    REQUEST_FIELDS,
    SERVE_OPTIONS,
    SPECULATIVE_CONFIG,
)
from outrider.client.cli.bench_options import VLLM_BENCH
from outrider.client.cli.foreign_options import OptionTable
from outrider.client.cli.llama_options import LLAMA
from outrider.client.cli.vllm_options import IGNORED, REFUSED
from outrider.client.stack.serve_plan import plan_serving
from outrider.gateway.openai.schema import ChatCompletionRequest, CompletionRequest, parse_body
from outrider.offline import LLM
from outrider.offline.arguments import check_other_arguments
from outrider.offline.speculation import plan_speculation
from outrider.shared.errors import OutriderError
from outrider.shared.speculative_config import parse_speculative_config


def speculative_config_table() -> str:
    def serve(key: str, value: Any) -> None:
        for _option, reason in plan_serving(json.dumps({key: value})).ignored:
            warnings.warn(reason, UserWarning, stacklevel=2)

    def services(key: str, value: Any) -> None:
        parse_speculative_config(json.dumps({key: value}))

    def offline(key: str, value: Any) -> None:
        plan_speculation({key: value}, "")

    header = ("key", "`outrider serve`", "`outrider up` and the gateway", "offline `LLM`")
    rows = (
        [code(key), *(_outcome(ask, key, value) for ask in (serve, services, offline))]
        for key, value in SPECULATIVE_CONFIG.items()
    )
    return table(header, rows)


def request_fields_table() -> str:
    rows = []
    for name, (where, value) in REQUEST_FIELDS.items():
        endpoints = (COMPLETIONS, CHAT) if where == BOTH else (where,)
        outcomes = [_request_outcome(endpoint, name, value) for endpoint in endpoints]
        if len(set(outcomes)) > 1:
            raise ValueError(f"{name} differs between the endpoints: list it twice in {__file__}")
        rows.append([code(name), "" if where == BOTH else where, outcomes[0]])
    return table(("field", "only in", "here"), rows)


def _request_outcome(endpoint: str, name: str, value: Any) -> str:
    kind: Any = ChatCompletionRequest if endpoint == CHAT else CompletionRequest
    required = {"messages": [{"role": "user", "content": "x"}]} if endpoint == CHAT else {"prompt": "x"}
    known = name in kind.model_fields
    done = "same" if known else "accepted, changes nothing"
    return _outcome(lambda name, value: parse_body(kind, {**required, name: value}) and None, name, value, done)


def metrics_table() -> str:
    services: dict[str, list[str]] = {}
    for service, registry in registries().items():
        for family in registry.collect():
            services.setdefault(family.name.removeprefix("outrider:"), []).append(service)
    rows = []
    for name in METRICS:
        found = services.get(name)
        here = f"{code('outrider:' + name)} at {' and '.join(found)}" if found else "absent"
        rows.append([code("vllm:" + name), here])
    return table(("vLLM", "here"), rows)


def endpoints_table() -> str:
    paths = openapi_document()["paths"]
    rows = [
        [", ".join(code(path) for path in ENDPOINTS if path in paths), "same path"],
        [", ".join(code(path) for path in ENDPOINTS if path not in paths), "404"],
    ]
    return table(("vLLM", "here"), rows)


def serve_options_table() -> str:
    served = {"MODEL", *(option for parameter in command_tree()["serve"].params for option in parameter.opts)}
    rows = []
    for theirs, (service, ours, note) in SERVE_OPTIONS.items():
        if ours.removeprefix("--").replace("-", "_") not in dict(SERVICES)[service].__dataclass_fields__:
            raise ValueError(f"{service} has no setting {ours}; mend {__file__}")
        taken = (
            "yes" if theirs in served else "ignored" if theirs in IGNORED else "refused" if theirs in REFUSED else ""
        )
        rows.append([code(theirs), taken, f"{service.removesuffix('_service')} {code(ours)}", note])
    return table(("`vllm serve`", "`outrider serve`", "of the services", ""), rows)


def ignored_options_table() -> str:
    return _by_sentence("reason", IGNORED)


def refused_options_table() -> str:
    return _by_sentence("instead", REFUSED)


def llama_options_table() -> str:
    return _by_sentence("the same as", {theirs: code(ours) for theirs, ours in LLAMA.same.items()}, "`llama-server`")


def llama_other_options_table() -> str:
    return _other_options(LLAMA, "`llama-server`")


def bench_options_table() -> str:
    return _other_options(VLLM_BENCH, "`vllm bench serve`")


def _other_options(options: OptionTable, program: str) -> str:
    ignored = {name: f"ignored: {reason}" for name, reason in options.ignored.items()}
    refused = {name: f"refused: {instead}" for name, instead in options.refused.items()}
    return _by_sentence("here", {**refused, **ignored}, program)


def _by_sentence(heading: str, sentences: Mapping[str, str], program: str = "`vllm serve`") -> str:
    options: dict[str, list[str]] = {}
    for option, sentence in sentences.items():
        options.setdefault(sentence, []).append(code(option))
    return table((program, heading), ([", ".join(names), cell(text)] for text, names in options.items()))


def llm_arguments_table() -> str:
    own = inspect.signature(LLM).parameters

    def check(name: str, value: Any) -> None:
        if name not in own:
            check_other_arguments({name: value})

    return table(
        ("argument of vLLM's `LLM`", "here"), ([code(k), _outcome(check, k, v)] for k, v in LLM_ARGUMENTS.items())
    )


def _outcome(ask: Callable[[str, Any], None], name: str, value: Any, done: str = "same") -> str:
    """Returns what our code says to this name: accepted, accepted with a warning, or refused with a message."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ask(name, value)
        except OutriderError as error:
            return _said("refused", name, error.message.split("; known are")[0])
    return _said("ignored, with a warning", name, str(caught[0].message)) if caught else done


def _said(outcome: str, name: str, message: str) -> str:
    """The outcome, and what our message says beyond the name of the option."""
    for empty in (f"unknown key {name!r}", f"{name} is not supported", f"{name} is ignored here: "):
        message = message.replace(empty, "")
    reason = message.strip().rpartition("--speculative-config:")[2].removeprefix("speculative_config:")
    reason = reason.removeprefix("LLM:").removeprefix(f"{name} of").removeprefix(f" {name}:").strip()
    return f"{outcome}: {cell(reason)}" if reason else outcome


TABLES: Mapping[str, Callable[[], str]] = {
    "vllm-speculative-config": speculative_config_table,
    "vllm-request-fields": request_fields_table,
    "vllm-metrics": metrics_table,
    "vllm-endpoints": endpoints_table,
    "vllm-serve-options": serve_options_table,
    "vllm-ignored-options": ignored_options_table,
    "vllm-refused-options": refused_options_table,
    "llama-options": llama_options_table,
    "llama-other-options": llama_other_options_table,
    "vllm-bench-options": bench_options_table,
    "vllm-llm-arguments": llm_arguments_table,
}
