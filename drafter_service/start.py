"""Builds a drafter from its settings and serves it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial

from prometheus_client import CollectorRegistry

from outrider.drafter_service.config import DrafterConfig
from outrider.drafter_service.engine import DrafterEngine
from outrider.drafter_service.metrics import DrafterMetrics
from outrider.drafter_service.server import DrafterServicer
from outrider.drafter_service.tenants import Tenants
from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.registry import build_heads
from outrider.drafting.serving.loading import DraftLoader, DraftVersionMetrics, require_cpu, warm
from outrider.drafting.serving.several import DraftHeadMetrics, joined
from outrider.engine.model.load import resolve_device
from outrider.engine.model.local_model import local_model
from outrider.engine.sampling.coupling import NOISE_VERSION
from outrider.shared.api_keys import KeyRing
from outrider.shared.checkpoint.tokenizer_digest import tokenizer_digest
from outrider.shared.config import load_config
from outrider.shared.draft_policy.named_drafts import NamedDraft, with_paths
from outrider.shared.messages import DrafterInfo
from outrider.shared.service import ServedApi, require_callers_known, serve_until_signal
from outrider.shared.telemetry import setup_logging
from outrider.shared.tracing.setup import tracing
from outrider.shared.version import outrider_version
from outrider.v1 import drafter_pb2_grpc

EPILOG = """examples:
  outrider drafter --draft-model models/demo-draft
  outrider drafter --draft-model models/demo-eagle3 --target-model models/demo-target
  outrider drafter --methods ngram --prompt-lookup-max 4 --port 7012
"""


async def serve(argv: list[str]) -> None:
    config = load_config(
        DrafterConfig,
        argv,
        os.environ,
        prog="outrider drafter",
        description="The drafter service: proposes tokens to Outrider's gateways and to other engines.",
        epilog=EPILOG,
    )
    tls = config.tls()
    if config.allow_draft_loading:
        require_callers_known(config, "allow-draft-loading")
    ring = KeyRing(config.engine_keys_file, "engine-keys-file") if config.engine_keys_file else None
    config = with_folders(config)
    log = setup_logging("drafter", config.log_level, config.log_format)
    with tracing(config.otlp_traces_endpoint, "drafter") as tracer:
        registry = CollectorRegistry()
        if config.allow_draft_loading:
            require_cpu(resolve_device(config.device), "allow-draft-loading")
        with config.held_ports():
            methods = load_methods(config, log)
        metrics = DrafterMetrics(registry)
        engine = DrafterEngine(methods, max_num_seqs=config.max_num_seqs, metrics=metrics)
        metrics.watch(lambda: engine.num_sessions)
        digest = tokenizer_digest(vocabulary) if (vocabulary := vocabulary_folder(config)) else ""
        tenants = Tenants(ring, config.max_sessions_per_peer)
        DraftHeadMetrics(registry, methods)
        load_draft = None
        if config.allow_draft_loading:
            load_draft = DraftLoader(config, methods, engine.between_rounds, DraftVersionMetrics(registry), log).load
        servicer = DrafterServicer(engine, lambda: describe(config, engine, digest), tracer, tenants, load_draft)
        await serve_until_signal(
            ServedApi(
                "drafter", "outrider.v1.Drafter", partial(drafter_pb2_grpc.add_DrafterServicer_to_server, servicer)
            ),
            config,
            tls,
            registry,
            start=engine.start,
            stop=engine.stop,
        )


def with_folders(config: DrafterConfig) -> DrafterConfig:
    """Returns the config with model names replaced by local folders.

    Raises ConfigError that names the setting, or ModelRefused.
    """
    drafts = with_paths(config.draft_model, lambda name: local_model(name, "--draft-model"))
    return replace(config, draft_model=drafts, target_model=local_model(config.target_model, "--target-model"))


def load_methods(config: DrafterConfig, log: logging.Logger) -> dict[str, DraftMethod]:
    """Loads the draft methods and warms them up. Raises ConfigError."""
    built = build_heads(config, log.info)
    return joined(built, lambda method: warm(method, log, versions=config.allow_draft_loading))


def vocabulary_folder(config: DrafterConfig) -> str:
    """The folder of the model whose ids proposals are in; "" where no method has a vocabulary."""
    return config.target_model or next((NamedDraft.of(entry).path for entry in config.draft_model), "")


def describe(config: DrafterConfig, engine: DrafterEngine, tokenizer_digest: str = "") -> DrafterInfo:
    return DrafterInfo(
        version=outrider_version(),
        methods=tuple(method.info for method in engine.methods.values()),
        noise_version=NOISE_VERSION,
        num_sessions=engine.num_sessions,
        max_sessions=config.max_num_seqs,
        tokenizer_digest=tokenizer_digest,
    )
