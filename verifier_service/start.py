"""Builds a verifier from its settings and serves it."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from outrider.drafting.methods.registry import plan_methods
from outrider.drafting.serving.several import DraftHeadMetrics
from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.certificate import certify
from outrider.engine.errors import ModelRefused
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.model.local_model import local_model
from outrider.engine.recurrent.memory import CPU_CACHE_MB, describe_slots, gpu_cache_bytes, plan_memory
from outrider.engine.run.runner import ModelRunner
from outrider.engine.sampling.coupling import NOISE_VERSION, compiled_race
from outrider.engine.sampling.host_sampling import compiled_acceptance
from outrider.engine.tensor_parallel.leader import load_sharded
from outrider.engine.tensor_parallel.protocol import LoadSpec
from outrider.shared.checkpoint.hub import hub_id
from outrider.shared.config import load_config
from outrider.shared.draft_policy.named_drafts import NamedDraft, with_paths
from outrider.shared.errors import ConfigError
from outrider.shared.machine.memory import give_back_freed_memory
from outrider.shared.messages import CertificateCheck, RowInvarianceCertificate, VerifierInfo
from outrider.shared.service import ServedApi, require_callers_known, serve_until_signal
from outrider.shared.telemetry import model_labels, setup_logging
from outrider.shared.tracing.setup import tracing
from outrider.shared.version import outrider_version
from outrider.v1 import verifier_pb2_grpc
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.learning.learner import Learner, build_learner, learned_head
from outrider.verifier_service.learning.record import LearningRecord
from outrider.verifier_service.learning.recorder import build_recorder
from outrider.verifier_service.local_methods import build_local_methods, draft_loader
from outrider.verifier_service.metrics import VerifierMetrics
from outrider.verifier_service.reload.candidate import target_kind
from outrider.verifier_service.reload.reloader import TargetMetrics, TargetReloader
from outrider.verifier_service.reload.served_target import ServedTarget, TargetState
from outrider.verifier_service.rounds import EngineLimits
from outrider.verifier_service.server import VerifierServicer
from outrider.verifier_service.timing.step_costs import measure_step_costs

# layers whose hidden states trained heads read; EAGLE-3's
_HEAD_LAYERS = 3

EPILOG = """examples:
  python -m outrider.verifier_service --model models/demo-target
  python -m outrider.verifier_service --model ~/checkpoints/my-llama --dtype bfloat16 --kv-cache-mb 4096
  python -m outrider.verifier_service --model models/demo-target --local-draft-model models/demo-draft
"""


def with_folders(config: VerifierConfig) -> VerifierConfig:
    """Returns the config with model names replaced by local folders.

    Raises ConfigError that names the setting, or ModelRefused.
    """
    drafts = with_paths(config.local_draft_model, lambda name: local_model(name, "--local-draft-model"))
    return replace(
        config,
        model=local_model(config.model, "--model"),
        local_draft_model=drafts,
        served_model_name=config.served_model_name or hub_id(config.model),
    )


def check_settings(config: VerifierConfig) -> None:
    """Checks what can be checked without reading weights. Raises ConfigError that names the setting."""
    if not config.model:
        raise ConfigError("--model: name the target: a checkpoint folder, .gguf file or Hub id", param="model")
    if config.local_draft_model or config.local_methods:
        plan_methods(config.local_draft_model, config.local_methods, config.model, prefix="--local-")
    if config.learn != "off":
        learned_head(config)
        if config.learn == "per-salt" and config.learn_checkpoints:
            raise ConfigError(
                "--learn-checkpoints: not with --learn per-salt, whose heads go with the process",
                param="learn_checkpoints",
            )
        if config.allow_draft_loading:
            raise ConfigError(
                "--learn: not together with --allow-draft-loading, which changes heads too", param="learn"
            )
    if config.allow_draft_loading:
        require_callers_known(config, "allow-draft-loading")
    if config.allow_target_reload:
        _check_target_reload(config)


def _check_target_reload(config: VerifierConfig) -> None:
    require_callers_known(config, "allow-target-reload")
    if config.record_hidden_states:
        raise ConfigError(
            "--record-hidden-states: not together with --allow-target-reload: the states are of one set of weights",
            param="record_hidden_states",
        )
    if config.learn != "off":
        raise ConfigError("--learn: not together with --allow-target-reload: a head learns one target", param="learn")
    if config.tensor_parallel_size > 1:
        raise ConfigError("--allow-target-reload: not with several ranks", param="allow_target_reload")


@contextmanager
def naming_setting(config: VerifierConfig) -> Iterator[None]:
    """Puts the setting before the refusal of a checkpoint. Raises ConfigError."""
    try:
        yield
    except ModelRefused as error:
        flag = "model" if error.path == config.model else "local-draft-model"
        raise ConfigError(f"--{flag}: {error.message}", param=flag.replace("-", "_")) from error


def build_engine(
    config: VerifierConfig, registry: CollectorRegistry, log: logging.Logger, draft_prefix: str = "--local-"
) -> tuple[VerifierEngine, LoadedModel]:
    """Loads the target, sizes the KV cache, certifies row invariance. Raises ConfigError or ModelRefused.

    draft_prefix: what the names of the drafts' settings begin with in errors.
    """
    spec = LoadSpec(
        config.model,
        config.dtype,
        config.device,
        config.attention_backend,
        config.max_model_len or None,
        config.num_threads or len(os.sched_getaffinity(0)),
        config.kv_cache_dtype,
        config.packed_arithmetic,
    )
    loaded = load_sharded(spec, config.tensor_parallel_size, on_progress=log.info)
    bytes_per_slot = loaded.bytes_per_slot()
    plan = plan_memory(
        _cache_bytes(config, loaded), loaded.bytes_per_block(config.block_size), bytes_per_slot, config.max_num_seqs
    )
    num_blocks = plan.num_blocks
    cache = loaded.make_cache(num_blocks, config.block_size)
    states = loaded.make_states(plan.num_slots)
    runner = ModelRunner(loaded, cache, states, graphs=not config.enforce_eager)
    certificate = certify(loaded, runner)
    blocks = BlockManager(num_blocks, config.block_size, prefix_caching=config.enable_prefix_caching)
    limits = EngineLimits(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.prefill_chunk_size,
        loaded.max_model_len,
        config.rejection_sample_method,
        config.slo_itl_ms * 1e-3 or math.inf,
    )
    metrics = VerifierMetrics(registry)
    metrics.observe_certificate(certificate.holds)
    log.info(certificate.describe())
    log.info(
        "%d KV blocks of %d positions, in %s %d bytes a position, context %d",
        num_blocks,
        config.block_size,
        loaded.kv_cache_name,
        loaded.bytes_per_block(config.block_size) // config.block_size,
        loaded.max_model_len,
    )
    if states is not None:
        log.info(describe_slots(plan, bytes_per_slot, config.max_num_seqs))
    compiled_race()  # compiles now, so that no request waits for it
    if loaded.attention_ops.row_backend != "triton":
        compiled_acceptance()
    try:
        methods = build_local_methods(config, loaded, log, draft_prefix)
    except BaseException:
        loaded.close()  # its ranks would outlive a process that goes on, as an offline one does
        raise
    tapped = {layer for method in methods.values() for layer in method.info.hidden_layers}
    tap_layers = sorted(tapped if config.learn == "off" else {*tapped, loaded.num_layers})
    step_costs = measure_step_costs(runner, num_blocks, config.block_size, tap_layers)
    cache.give_back()  # what the checks and timings wrote: 109 MB for SmolLM2-135M
    log.info(
        "a forward of 1 row takes %.1f ms, of 16 rows %.1f ms", *(1e3 * step_costs.seconds(rows) for rows in (1, 16))
    )
    engine = VerifierEngine(runner, blocks, limits, certificate, metrics, step_costs, methods)
    metrics.watch(lambda: engine.num_sessions, lambda: engine.num_waiting, blocks)
    return engine, loaded


def _cache_bytes(config: VerifierConfig, loaded: LoadedModel) -> int:
    """Returns the bytes of the target's cache, per rank. Raises ConfigError."""
    if config.kv_cache_mb or loaded.device.type == "cpu":
        return (config.kv_cache_mb or CPU_CACHE_MB) << 20
    free, total = torch.cuda.mem_get_info(loaded.device)
    drafts = [Path(NamedDraft.of(entry).path) for entry in config.local_draft_model]
    drafting = sum(file.stat().st_size for folder in drafts for file in folder.iterdir())
    drafting += (len(drafts) * config.local_kv_cache_mb) << 20
    logits = 6 * config.max_num_batched_tokens * loaded.vocab_size  # as they are, and in float32
    cache_bytes = gpu_cache_bytes(config.gpu_memory_utilization, total, free, drafting + logits)
    # Heads read hidden states, which are kept for each position too (engine/attention/hidden_store).
    position_bytes = loaded.bytes_per_block(config.block_size) / config.block_size
    hidden_bytes = _HEAD_LAYERS * loaded.hidden_size * loaded.dtype.itemsize if drafts else 0
    return int(cache_bytes * position_bytes / (position_bytes + hidden_bytes))


def served_name(config: VerifierConfig) -> str:
    """The model's name in requests and metrics."""
    return config.served_model_name or Path(config.model).name


def describe(
    config: VerifierConfig,
    engine: VerifierEngine,
    target: TargetState | None = None,
    learner: Learner | None = None,
) -> VerifierInfo:
    """target: None where its kind is not measured."""
    target = target or TargetState("")
    loaded, certificate, states = engine.loaded, engine.certificate, engine.states
    return VerifierInfo(
        model=served_name(config),
        version=outrider_version(),
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        hidden_size=loaded.hidden_size,
        num_hidden_layers=loaded.num_layers,
        num_blocks=engine.blocks.num_blocks,
        num_free_blocks=engine.blocks.num_free_blocks,
        block_size=engine.blocks.block_size,
        num_sessions=engine.num_sessions,
        num_waiting=engine.num_waiting,
        max_sessions=config.max_num_seqs,
        noise_version=NOISE_VERSION,
        certificate=RowInvarianceCertificate(
            certificate.holds,
            certificate.failing_operation or "",
            tuple(CertificateCheck(check.name, check.holds) for check in certificate.checks),
        ),
        numerics=target.numerics,
        local_methods=engine.local_methods,
        num_state_slots=0 if states is None else states.num_slots,
        num_free_state_slots=0 if states is None else states.num_free_slots,
        round_us=engine.round_us,
        learning=None if learner is None else learner.record.now,
        target_version=target.version if config.allow_target_reload else 0,
        next_numerics=target.next_numerics,
    )


async def serve(argv: list[str]) -> None:
    config = load_config(
        VerifierConfig,
        argv,
        os.environ,
        prog="python -m outrider.verifier_service",
        description="The verifier service.",
        epilog=EPILOG,
    )
    tls = config.tls()
    config = with_folders(config)
    check_settings(config)
    log = setup_logging("verifier", config.log_level, config.log_format)
    with tracing(config.otlp_traces_endpoint, "verifier") as tracer:
        registry = CollectorRegistry()
        with config.held_ports(), naming_setting(config):
            engine, loaded = build_engine(config, registry, log)
            served = ServedTarget(target_kind(loaded, config))
        give_back_freed_memory()  # what the checks and timings took: 100 MB for a target of 135 M parameters
        log.info("numerics: %s", served.state.numerics)
        swaps = config.allow_draft_loading or config.allow_target_reload or config.learn != "off"
        DraftHeadMetrics(registry, engine.draft_methods)
        loader = draft_loader(config, engine, registry, log) if swaps else None
        load_draft = loader.load if loader is not None and config.allow_draft_loading else None
        learner = None
        if loader is not None and config.learn != "off":
            learner = build_learner(config, engine, loader, LearningRecord(registry), log)
        recorder = build_recorder(config, engine, log) if config.record_hidden_states else None
        load_target = None
        if loader is not None and config.allow_target_reload:
            load_target = TargetReloader(config, engine, served, loader, TargetMetrics(registry), log).load
        servicer = VerifierServicer(
            engine, lambda: describe(config, engine, served.state, learner), tracer, load_draft, served, load_target
        )

        def start() -> None:
            engine.start()
            for beside in (learner, recorder):
                if beside is not None:
                    beside.start()

        def stop() -> None:
            if learner is not None:
                learner.stop()
            engine.stop()
            if recorder is not None:
                recorder.stop()
            engine.loaded.close()

        await serve_until_signal(
            ServedApi(
                "verifier", "outrider.v1.Verifier", partial(verifier_pb2_grpc.add_VerifierServicer_to_server, servicer)
            ),
            config,
            tls,
            registry,
            start=start,
            stop=stop,
            metric_labels=model_labels(served_name(config)),
        )
