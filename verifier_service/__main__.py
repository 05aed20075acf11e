"""The verifier service: `python -m verifier_service --model models/demo-target`."""

from __future__ import annotations

import logging
import math
import os
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from engine.block_manager import BlockManager
from engine.certificate import certify
from engine.coupling import NOISE_VERSION, compiled_race
from engine.model import LoadedModel
from engine.numerics import measure_numerics
from engine.runner import ModelRunner
from engine.tensor_parallel.leader import load_sharded
from engine.tensor_parallel.protocol import LoadSpec
from outrider.v1 import verifier_pb2_grpc
from shared.config import load_config
from shared.errors import ConfigError
from shared.messages import CertificateCheck, VerifierInfo
from shared.service import Endpoint, is_enabled_at, run_service, serve_until_signal
from shared.telemetry import setup_logging
from shared.tls import server_tls
from shared.tracing import tracing
from shared.version import outrider_version
from verifier_service.config import VerifierConfig
from verifier_service.engine import EngineLimits, VerifierEngine
from verifier_service.local_methods import build_local_methods
from verifier_service.metrics import VerifierMetrics
from verifier_service.server import VerifierServicer
from verifier_service.step_costs import measure_step_costs

EPILOG = """examples:
  python -m verifier_service --model models/demo-target
  python -m verifier_service --model ~/checkpoints/my-llama --dtype bfloat16 --kv-cache-mb 4096
  python -m verifier_service --model models/demo-target --local-draft-model models/demo-draft
"""


def build_engine(
    config: VerifierConfig, registry: CollectorRegistry, log: logging.Logger
) -> tuple[VerifierEngine, LoadedModel]:
    """Loads the target, sizes the cache, certifies. Raises ConfigError or ModelRefused."""
    if not config.model:
        raise ConfigError("--model: name the folder of the target's checkpoint", param="model")
    spec = LoadSpec(
        config.model,
        config.dtype,
        config.device,
        config.attention_backend,
        config.max_model_len or None,
        config.num_threads or len(os.sched_getaffinity(0)),
    )
    loaded = load_sharded(spec, config.tensor_parallel_size, on_progress=log.info)
    num_blocks = max(1, config.kv_cache_mb * 2**20 // loaded.bytes_per_block(config.block_size))
    cache = loaded.make_cache(num_blocks, config.block_size)
    runner = ModelRunner(loaded, cache, graphs=not config.enforce_eager)
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
    log.info("%d KV blocks of %d positions, context %d", num_blocks, config.block_size, loaded.max_model_len)
    compiled_race()  # so that no request waits for it
    methods = build_local_methods(config, loaded, log)
    tap_layers = sorted({layer for method in methods.values() for layer in method.info.hidden_layers})
    step_costs = measure_step_costs(runner, num_blocks, config.block_size, tap_layers)
    log.info(
        "a forward of 1 row takes %.1f ms, of 16 rows %.1f ms", *(1e3 * step_costs.seconds(rows) for rows in (1, 16))
    )
    engine = VerifierEngine(runner, blocks, limits, certificate, metrics, step_costs, methods)
    metrics.watch(lambda: engine.num_sessions, lambda: engine.num_waiting)
    return engine, loaded


def describe(config: VerifierConfig, engine: VerifierEngine, loaded: LoadedModel, numerics: str = "") -> VerifierInfo:
    certificate = engine.certificate
    return VerifierInfo(
        model=config.served_model_name or Path(config.model).name,
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
        certificate_holds=certificate.holds,
        failing_operation=certificate.failing_operation or "",
        certificate_checks=tuple(CertificateCheck(check.name, check.holds) for check in certificate.checks),
        numerics=numerics,
        local_methods=engine.local_methods,
    )


async def serve(argv: list[str]) -> None:
    config = load_config(
        VerifierConfig, argv, os.environ, prog="python -m verifier_service", description=__doc__ or "", epilog=EPILOG
    )
    tls = server_tls(config.tls_cert_file, config.tls_key_file, config.tls_ca_file)  # before the model is loaded
    with tracing(config.otlp_traces_endpoint, "verifier") as tracer:
        registry = CollectorRegistry()
        log = setup_logging("verifier", config.log_level)
        engine, loaded = build_engine(config, registry, log)
        numerics = measure_numerics(
            loaded, tensor_parallel_size=config.tensor_parallel_size, graphs=not config.enforce_eager
        )
        log.info("computes with numerics %s", numerics)
        servicer = VerifierServicer(engine, lambda: describe(config, engine, loaded, numerics), tracer)

        def stop() -> None:
            engine.stop()
            loaded.close()

        await serve_until_signal(
            Endpoint(
                "verifier",
                "outrider.v1.Verifier",
                config.host,
                config.port,
                config.metrics_port,
                config.drain_s,
                tls=tls,
                reflection=is_enabled_at(config.host, config.reflection),
            ),
            lambda server: verifier_pb2_grpc.add_VerifierServicer_to_server(servicer, server),
            registry,
            start=engine.start,
            stop=stop,
        )


def main() -> int:
    return run_service("verifier", lambda: serve(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
