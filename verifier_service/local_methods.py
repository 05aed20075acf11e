"""The draft methods of a verifier with local drafting, built as a drafter builds them, and new weights for them."""

from __future__ import annotations

import dataclasses
import logging

from prometheus_client import CollectorRegistry

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.registry import build_heads
from outrider.drafting.serving.loading import DraftLoader, DraftVersionMetrics, require_cpu, warm
from outrider.drafting.serving.several import joined
from outrider.drafting.settings import LookupSettings, MethodSettings
from outrider.engine.model.loaded import LoadedModel
from outrider.shared.errors import ConfigError
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.engine import VerifierEngine


def build_local_methods(
    config: VerifierConfig, loaded: LoadedModel, log: logging.Logger, prefix: str = "--local-"
) -> dict[str, DraftMethod]:
    """Builds the local draft methods, by name; empty if the settings ask for none.

    prefix: of the settings' names in errors. Raises ConfigError that names the setting.
    """
    if not config.local_draft_model and not config.local_methods:
        return {}
    swaps = config.allow_draft_loading or config.allow_target_reload or config.learn != "off"

    def ready(method: DraftMethod) -> DraftMethod:
        """Returns the method warm, as it serves."""
        fits = method.info.fits(
            vocab_size=loaded.vocab_size, hidden_size=loaded.hidden_size, num_hidden_layers=loaded.num_layers
        )
        if not fits:
            raise ConfigError(
                f"{prefix}draft-model: {method.info.model} was trained for another target than {config.model}",
                param="local_draft_model",
            )
        return warm(method, log, versions=swaps)

    return joined(build_heads(_settings(config), log.info, loaded, prefix=prefix), ready)


def draft_loader(
    config: VerifierConfig, engine: VerifierEngine, registry: CollectorRegistry, log: logging.Logger
) -> DraftLoader:
    """What loads new weights for the engine's own draft methods. Raises ConfigError on a GPU."""
    asked = "allow-draft-loading" if config.allow_draft_loading else "allow-target-reload"
    require_cpu(engine.loaded.device, "learn" if config.learn != "off" else asked)
    metrics = DraftVersionMetrics(registry)
    return DraftLoader(
        _settings(config), engine.draft_methods, engine.between_rounds, metrics, log, lambda: engine.loaded
    )


def _settings(config: VerifierConfig) -> MethodSettings:
    lookups = {field.name: getattr(config, field.name) for field in dataclasses.fields(LookupSettings)}
    return MethodSettings(
        draft_model=config.local_draft_model,
        target_model=config.model,
        methods=config.local_methods,
        dtype=config.dtype,
        device=config.device,
        attention_backend=config.attention_backend,
        packed_arithmetic=config.packed_arithmetic,
        enforce_eager=config.local_enforce_eager,
        num_threads=config.num_threads,
        block_size=config.block_size,
        kv_cache_mb=config.local_kv_cache_mb,
        prefill_chunk_size=config.prefill_chunk_size,
        max_num_seqs=config.max_num_seqs,
        **lookups,
    )
