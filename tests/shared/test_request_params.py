"""One SamplingParams for the client and for offline use: where it is found, its fields, its defaults, what it loads."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import outrider
from outrider import client, offline
from outrider.shared.errors import InvalidRequest
from outrider.shared.request_params import (
    RequestOutputKind,
    SamplingParams,
    Speculation,
    StructuredOutputsParams,
    speculation_fields,
)

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "numba", "grpc", "fastapi", "pydantic", "numpy"}
# vLLM's own fields and defaults.
DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "extra_args": {},
    "output_kind": RequestOutputKind.CUMULATIVE,
}
OWN_DEFAULTS = {"speculation": Speculation(), "cache_salt": "", "prediction": ""}


def in_a_fresh_process(code: str) -> str:
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout.strip()


def test_it_is_one_class_everywhere() -> None:
    assert outrider.SamplingParams is client.SamplingParams is offline.SamplingParams is SamplingParams
    assert client.StructuredOutputsParams is offline.StructuredOutputsParams is StructuredOutputsParams
    assert client.Speculation is Speculation


def test_the_names_at_the_top() -> None:
    of_offline = {"LLM", "AsyncLLM", "AsyncEngineArgs", "TextPrompt", "TokensPrompt", "StructuredOutputsParams"}
    of_client = {"OutriderClient", "AsyncOutriderClient"}
    assert all(getattr(outrider, name) is getattr(offline, name) for name in of_offline)
    assert all(getattr(outrider, name) is getattr(client, name) for name in of_client)
    assert set(outrider.__all__) == {*of_offline, *of_client, "SamplingParams"}
    assert set(outrider.__all__) <= set(dir(outrider))
    with pytest.raises(AttributeError, match="Nothing"):
        _ = outrider.Nothing


@pytest.mark.parametrize("code", ["import outrider", "from outrider import SamplingParams"])
def test_the_import_alone_is_light(code: str) -> None:
    assert in_a_fresh_process(f"import sys\n{code}\nprint(sorted({HEAVY!r} & sys.modules.keys()))") == "[]"


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (
            "from outrider import LLM, AsyncLLM, SamplingParams, OutriderClient, AsyncOutriderClient",
            {"torch", "transformers"},
        ),
        (
            "from outrider import OutriderClient, SamplingParams",
            {"torch", "numpy", "fastapi", "pydantic", "outrider.offline"},
        ),
    ],
)
def test_what_the_names_load(code: str, absent: set[str]) -> None:
    assert in_a_fresh_process(f"import sys\n{code}\nprint(sorted({absent!r} & sys.modules.keys()))") == "[]"


def test_the_defaults_are_vllms() -> None:
    assert vars(SamplingParams()) == {**DEFAULTS, **OWN_DEFAULTS}
    assert {entry.name for entry in dataclasses.fields(SamplingParams)} == {*DEFAULTS, *OWN_DEFAULTS}
    names = {"json", "regex", "choice", "grammar", "json_object", "whitespace_pattern"}
    flags = {"disable_any_whitespace", "disable_additional_properties"}
    assert vars(StructuredOutputsParams()) == {**dict.fromkeys(names), **dict.fromkeys(flags, False)}
    defaults = {"method": "", "num_speculative_tokens": 0, "mode": "", "token_tree": None, "learn": None}
    assert vars(Speculation()) == defaults


def test_it_can_be_changed_and_takes_names_only() -> None:
    params = SamplingParams()
    params.max_tokens = 5
    assert params == SamplingParams(max_tokens=5)
    with pytest.raises(TypeError):
        SamplingParams(1)  # type: ignore[misc]
    params.extra_args["speculation"] = {"method": "off"}  # type: ignore[index]
    assert SamplingParams().extra_args == {}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), {}),
        (SamplingParams(extra_args=None), {}),
        (
            SamplingParams(speculation=Speculation(method="ngram", token_tree=False)),
            {"method": "ngram", "token_tree": False},
        ),
        (SamplingParams(speculation={"method": "off", "mode": None}), {"method": "off"}),
        (SamplingParams(extra_args={"speculation": {"mode": "exact"}}), {"mode": "exact"}),
        (SamplingParams(extra_args={"speculation": Speculation(mode="exact")}), {"mode": "exact"}),
    ],
)
def test_speculation_as_it_is_given(params: SamplingParams, expected: dict[str, object]) -> None:
    assert speculation_fields(params) == expected


@pytest.mark.parametrize(
    ("params", "param", "says"),
    [
        (SamplingParams(extra_args={"lora": 1}), None, "'lora' is not known, only speculation is"),
        (
            SamplingParams(speculation=Speculation(method="off"), extra_args={"speculation": {"method": "off"}}),
            "speculation",
            "not both",
        ),
        (SamplingParams(speculation="off"), "speculation", "must be a Speculation or a mapping, got str"),  # type: ignore[arg-type]
    ],
)
def test_speculation_that_is_refused(params: SamplingParams, param: str | None, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        speculation_fields(params)
    assert refused.value.param == param
