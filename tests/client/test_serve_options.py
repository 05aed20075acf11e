"""Options of `vllm serve` at `outrider serve`: taken and passed on, ignored, or refused with what to do instead."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from command import ROOT
from typer.testing import CliRunner

from docs.generate.cli_page import command_tree
from docs.generate.vllm_names import SERVE_OPTIONS
from outrider.client.cli import serve as serve_module
from outrider.client.cli.app import app
from outrider.client.cli.vllm_options import REFUSED, VLLM
from outrider.client.stack.commands import StackSettings, StackState, gateway_command, verifier_command
from outrider.gateway.config import GatewayConfig
from outrider.shared.api_keys import key_digest, parse_key_file
from outrider.shared.config import load_config
from outrider.verifier_service.config import VerifierConfig

TARGET = str(ROOT / "models" / "demo-target")
# The fields of BaseFrontendArgs and FrontendArgs in vLLM's entrypoints/openai/cli_args.py.
FRONTEND = """
lora_modules chat_template chat_template_content_format trust_request_chat_template default_chat_template_kwargs
response_role return_tokens_as_token_ids enable_auto_tool_choice exclude_tools_when_tool_choice_none tool_call_parser
tool_parser_plugin tool_server log_config_file max_log_len enable_prompt_tokens_details enable_per_request_metrics
enable_server_load_tracking enable_force_include_usage enable_tokenizer_info_endpoint enable_log_outputs
enable_log_deltas cohere_is_reasoning_model cohere_format log_error_stack tokens_only fingerprint_mode
fingerprint_value host port data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s
dp_supervisor_probe_failure_threshold uds uvicorn_log_level disable_uvicorn_access_log
disable_access_log_for_endpoints allow_credentials allowed_origins allowed_methods allowed_headers api_key ssl_keyfile
ssl_certfile ssl_ca_certs enable_ssl_refresh ssl_cert_reqs ssl_ciphers root_path middleware enable_request_id_headers
disable_fastapi_docs h11_max_incomplete_event_size h11_max_header_count enable_offline_docs
enable_flash_late_interaction
"""
# Of EngineArgs in vLLM's engine/arg_utils.py, those of many releases.
ENGINE = """
model task tokenizer skip_tokenizer_init revision code_revision tokenizer_revision tokenizer_mode trust_remote_code
allowed_local_media_path download_dir load_format config_format dtype kv_cache_dtype max_model_len
guided_decoding_backend logits_processor_pattern model_impl distributed_executor_backend pipeline_parallel_size
tensor_parallel_size max_parallel_loading_workers ray_workers_use_nsight block_size enable_prefix_caching
disable_sliding_window use_v2_block_manager num_lookahead_slots seed swap_space cpu_offload_gb gpu_memory_utilization
num_gpu_blocks_override max_num_batched_tokens max_num_seqs max_logprobs disable_log_stats quantization rope_scaling
rope_theta hf_overrides enforce_eager max_seq_len_to_capture disable_custom_all_reduce tokenizer_pool_size
tokenizer_pool_type tokenizer_pool_extra_config limit_mm_per_prompt mm_processor_kwargs disable_mm_preprocessor_cache
enable_lora enable_lora_bias max_loras max_lora_rank lora_extra_vocab_size lora_dtype long_lora_scaling_factors
max_cpu_loras fully_sharded_loras enable_prompt_adapter max_prompt_adapters max_prompt_adapter_token device
num_scheduler_steps multi_step_stream_outputs scheduler_delay_factor enable_chunked_prefill speculative_model
speculative_model_quantization num_speculative_tokens speculative_disable_mqa_scorer
speculative_draft_tensor_parallel_size speculative_max_model_len speculative_disable_by_batch_size
ngram_prompt_lookup_max ngram_prompt_lookup_min spec_decoding_acceptance_method
typical_acceptance_sampler_posterior_threshold typical_acceptance_sampler_posterior_alpha
disable_logprobs_during_spec_decoding model_loader_extra_config ignore_patterns preemption_mode served_model_name
qlora_adapter_name_or_path otlp_traces_endpoint collect_detailed_traces disable_async_output_proc scheduling_policy
override_neuron_config override_pooler_config compilation_config kv_transfer_config worker_cls generation_config
override_generation_config enable_sleep_mode calculate_kv_scales disable_log_requests
"""


def taken() -> set[str]:
    parameters = command_tree()["serve"].params
    return {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}


def test_every_option_of_vllm_is_known() -> None:
    names = {f"--{name.replace('_', '-')}" for name in (FRONTEND + ENGINE).split()} | (SERVE_OPTIONS.keys() - {"MODEL"})
    assert names - taken() - VLLM.names == set()
    assert taken() & VLLM.names == set()


@pytest.mark.parametrize("option", sorted(REFUSED))
def test_a_refusal_says_what_to_do_instead(option: str) -> None:
    done = CliRunner().invoke(app, ["serve", TARGET, option, "dummy,21"])
    assert done.exit_code == 2
    assert " ".join(done.stderr.split()) == f"outrider: {option} of vLLM is not taken here: {REFUSED[option]}"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[StackSettings]:
    """What would be started; starting it is tests/e2e/apis/test_vllm_serve.py's."""
    settings: list[StackSettings] = []
    monkeypatch.setattr(serve_module, "run_in_foreground", lambda given, _run_dir: settings.append(given))
    return settings


def services(settings: StackSettings) -> tuple[VerifierConfig, GatewayConfig]:
    """The configurations that the services read from their command lines."""
    state = StackState(verifiers=["v:1"])
    commands = verifier_command(settings), gateway_command(settings, state)
    verifier, gateway = (command[command.index("-m") + 2 :] for command in commands)
    return (
        load_config(VerifierConfig, verifier, {}, prog="", description=""),
        load_config(GatewayConfig, gateway, {}, prog="", description=""),
    )


def test_what_is_taken_reaches_the_services(tmp_path: Path, started: list[StackSettings]) -> None:
    line = f"""serve --model {TARGET} --served_model_name mine --host 0.0.0.0 --dtype float --enforce-eager
    --max-num-seqs 8 --max_num_batched_tokens=128 --block-size 32 --no-enable-prefix-caching --max-model-len 256 -tp 2
    --kv-cache-memory-bytes 268435456 --kv-cache-dtype fp8_e4m3 --generation-config vllm --disable-fastapi-docs
    --per-request-spec-decode-metrics none --otlp-traces-endpoint http://collector:4317 --api-key sesame --api-key more
    --return-tokens-as-token-ids --enable-force-include-usage --enable-tokenizer-info-endpoint
    """
    texts = ["--chat-template", "{{ messages }}", "--override-generation-config", '{"top_p": 0.9}']
    done = CliRunner().invoke(app, [*line.split(), *texts, "--run-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    verifier, gateway = services(started[0])
    assert verifier == VerifierConfig(
        model=TARGET,
        served_model_name="mine",
        port=0,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        block_size=32,
        enable_prefix_caching=False,
        max_model_len=256,
        tensor_parallel_size=2,
        kv_cache_mb=256,
        kv_cache_dtype="fp8_e4m3",
        otlp_traces_endpoint="http://collector:4317",
        local_methods=("suffix", "ngram"),
    )
    assert (gateway.served_model_name, gateway.host, gateway.chat_template) == ("mine", "0.0.0.0", "{{ messages }}")
    assert (gateway.generation_config, gateway.override_generation_config) == ("vllm", '{"top_p": 0.9}')
    assert (gateway.api_docs, gateway.per_request_spec_decode_metrics) == (False, "none")
    assert (gateway.return_tokens_as_token_ids, gateway.enable_force_include_usage) == (True, True)
    assert (gateway.enable_tokenizer_info_endpoint, gateway.otlp_traces_endpoint) == (True, "http://collector:4317")
    key_file = Path(gateway.api_keys_file)
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    keys = parse_key_file(key_file.read_text(), "the file")
    assert [key.digest for key in keys] == [key_digest("sesame"), key_digest("more")]


def test_without_options_the_services_have_their_defaults(tmp_path: Path, started: list[StackSettings]) -> None:
    assert CliRunner().invoke(app, ["serve", TARGET, "--run-dir", str(tmp_path / "run")]).exit_code == 0
    verifier, gateway = services(started[0])
    assert verifier == VerifierConfig(model=TARGET, port=0, local_methods=("suffix", "ngram"))
    assert (gateway.api_keys_file, gateway.served_model_name) == ("", "")
    assert not (tmp_path / "run").exists()


def test_a_revision_is_of_a_hub_id(started: list[StackSettings]) -> None:
    assert CliRunner().invoke(app, ["serve", "org/tiny", "--revision", "v1"]).exit_code == 0
    verifier, gateway = services(started[0])
    assert (verifier.model, gateway.model) == ("org/tiny@v1", "org/tiny@v1")
    assert (verifier.served_model_name, gateway.served_model_name) == ("org/tiny", "org/tiny")


def test_half_is_float16(started: list[StackSettings]) -> None:
    assert CliRunner().invoke(app, ["serve", TARGET, "--dtype", "half"]).exit_code == 0
    assert services(started[0])[0].dtype == "float16"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "MODEL: give the target"),
        ([TARGET, "--revision", "main"], "files here have no revisions"),
        ([TARGET, "--model", "another"], "--model: another is given, and MODEL is"),
        ([TARGET, "--kv-cache-dtype", "fp8_e5m2"], "--kv-cache-dtype: 'fp8_e5m2' is not one of auto, fp8,"),
        ([TARGET, "--dtype", "int4"], "--dtype: 'int4' is not one of auto, bfloat16, float16 or half,"),
    ],
)
def test_wrong_values(arguments: list[str], said: str, started: list[StackSettings]) -> None:
    done = CliRunner().invoke(app, ["serve", *arguments])
    assert (done.exit_code, started) == (2, [])
    assert said in " ".join(done.stderr.split())
