"""vLLM's `--speculative-config` at `outrider serve`: which part gets which key, and what is refused."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from outrider.client.cli.app import app
from outrider.client.stack.serve_plan import ServePlan, plan_serving
from outrider.drafter_service.config import DrafterConfig
from outrider.shared.config import load_config
from outrider.shared.errors import ConfigError
from outrider.shared.speculative_config import parse_speculative_config
from outrider.verifier_service.config import VerifierConfig


def test_without_a_config_nothing_is_drafted() -> None:
    plan = plan_serving("")
    assert parse_speculative_config(plan.gateway_config).method == "off"
    assert plan == ServePlan("", plan.gateway_config)


def test_every_key_reaches_a_part_that_knows_it() -> None:
    given = {
        "model": "a-draft",
        "method": "ngram",
        "num-speculative-tokens": 7,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
        "suffix_decoding_max_tree_depth": 12,
        "enforce_eager": True,
        "rejection_sample_method": "standard",
        "draft_tensor_parallel_size": 1,
        "token_tree": None,
    }
    plan = plan_serving(json.dumps(given))
    gateway = parse_speculative_config(plan.gateway_config)
    assert (plan.draft_model, gateway.method, gateway.num_speculative_tokens) == ("a-draft", "ngram", 7)
    drafter = load_config(DrafterConfig, list(plan.drafter_args), {}, prog="", description="")
    assert (drafter.prompt_lookup_max, drafter.prompt_lookup_min, drafter.suffix_decoding_max_tree_depth) == (4, 2, 12)
    assert drafter.enforce_eager
    verifier = load_config(VerifierConfig, list(plan.verifier_args), {}, prog="", description="")
    assert verifier.rejection_sample_method == "standard"
    assert plan.ignored == (("--speculative-config.draft_tensor_parallel_size", "a draft runs in one process"),)


def test_the_drafters_keys_are_all_there() -> None:
    """Those of vLLM's that have its names, and that the offline door takes."""
    of_suffix = {entry.name for entry in fields(DrafterConfig) if entry.name.startswith(("suffix_", "prompt_lookup"))}
    for key in of_suffix - {"suffix_decoding_max_cached_nodes"}:
        assert plan_serving(json.dumps({key: 1})).drafter_args == (f"--{key.replace('_', '-')}", "1")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"method": "ngram", "synthetic_acceptance_length": 2}', "synthetic_acceptance_length is not supported"),
    ],
)
def test_what_cannot_be_served(config: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan_serving(config)
    done = CliRunner().invoke(app, ["serve", "models/demo-target", "-sc", config])
    assert done.exit_code == 2
    assert told in " ".join(done.stderr.split())


def test_mtp_with_the_folder_of_an_assistant() -> None:
    plan = plan_serving('{"method": "gemma4_mtp", "model": "org/x-assistant"}', "org/x")
    assert (plan.draft_model, parse_speculative_config(plan.gateway_config).method) == ("org/x-assistant", "mtp")
    config = '{"method": "mtp", "model": "models/demo-draft"}'
    done = CliRunner().invoke(app, ["serve", "models/demo-target", "-sc", config])
    assert done.exit_code != 0
    assert "method mtp needs a target with MTP layers, and none are read of model type llama" in " ".join(
        done.stderr.split()
    )


def test_the_target_named_as_its_own_draft() -> None:
    plan = plan_serving('{"method": "ernie_mtp", "model": "org/x", "quantization": "awq"}', "org/x")
    assert (plan.draft_model, parse_speculative_config(plan.gateway_config).method) == ("", "mtp")
    assert plan.ignored == (
        ("--speculative-config.quantization", "no text depends on how a draft is stored and computed"),
    )
