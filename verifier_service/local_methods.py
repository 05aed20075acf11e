"""The methods that a verifier drafts with by itself, built as a drafter builds them."""

from __future__ import annotations

import logging
import time

from drafter_service.config import DrafterConfig
from drafter_service.methods.interface import DraftMethod
from drafter_service.methods.registry import build_methods
from drafter_service.warm_up import warm_up
from engine.model import LoadedModel
from shared.errors import ConfigError
from verifier_service.config import VerifierConfig

_WITHOUT_CHECKPOINT = ("ngram", "suffix")


def build_local_methods(config: VerifierConfig, loaded: LoadedModel, log: logging.Logger) -> dict[str, DraftMethod]:
    """None where neither --draft-model nor --draft-methods says any. Raises ConfigError that names the setting."""
    if not config.draft_model and not config.draft_methods:
        return {}
    drafting = DrafterConfig(
        draft_model=config.draft_model,
        target_model=config.model,
        methods=config.draft_methods,
        dtype=config.dtype,
        device=config.device,
        attention_backend=config.attention_backend,
        enforce_eager=config.enforce_eager,
        num_threads=config.num_threads,
        block_size=config.block_size,
        kv_cache_mb=config.draft_kv_cache_mb,
        prefill_chunk_size=config.prefill_chunk_size,
    )
    methods = build_methods(drafting, log.info)
    if not config.draft_methods:
        methods = {name: method for name, method in methods.items() if name not in _WITHOUT_CHECKPOINT}
    for name, method in methods.items():
        fits = method.info.fits(
            vocab_size=loaded.vocab_size, hidden_size=loaded.hidden_size, num_hidden_layers=loaded.num_layers
        )
        if not fits:
            raise ConfigError(
                f"--draft-model: {method.info.model} was made for another target than {config.model}",
                param="draft_model",
            )
        if method.info.model:
            started = time.perf_counter()
            warm_up(method)
            log.info(
                "drafts by itself with %s %s, warm in %.1f s", name, method.info.model, time.perf_counter() - started
            )
        else:
            log.info("drafts by itself with %s", name)
    return methods
