"""The engines that the cells run on: one pair of models, several KV pools and prefill chunks.

Roomy pools hold a whole crowd, others a part of it or one session and little more: those preempt. Caches start full
of garbage, so that a read of what was never written shows.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from outrider.drafting.methods.draft_model import DraftModelNet, draft_model_method
from outrider.drafting.methods.growing import GrowingMethod
from outrider.drafting.methods.interface import DraftMethod
from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.certificate import Certificate
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from outrider.kernels.kv_codes.layout import parts_of
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.metrics import VerifierMetrics
from outrider.verifier_service.rounds import EngineLimits
from outrider.verifier_service.timing.step_costs import StepCosts
from tests.grid.heads import head_method
from tests.grid.models import GridModel

BLOCK_SIZE = 16
# A session of the grid ends at 23 blocks (67 + 256 positions and drafts); ROOMY holds fifteen of them.
ROOMY_BLOCKS = 360
# One, and little more.
SOLO_BLOCKS = 28
# Of recurrent states: two for each session of a crowd.
_NUM_SLOTS = 40
CHUNKS = {"whole": 4096, "chunk16": 16}
_GARBAGE = 3.0
_MAX_BATCHED_TOKENS = 4096
_STEP_COSTS = StepCosts([(1, 0.005), (128, 0.05)])


@dataclass(frozen=True)
class Pool:
    engine: VerifierEngine
    registry: CollectorRegistry

    @property
    def num_preemptions(self) -> int:
        return int(self.registry.get_sample_value("outrider:num_preemptions_total") or 0)

    def evict_everything(self) -> None:
        """Takes every block that no session holds, and gives it back. The engine must be idle."""
        blocks = self.engine.blocks
        table, _ = blocks.open([])
        blocks.grow(table, blocks.num_free_blocks * BLOCK_SIZE)
        blocks.close(table)


class Pools:
    """Engines by (prefill, number of KV blocks), started when first asked for; `close` stops them."""

    def __init__(self, model: GridModel, num_threads: int, device: str = "cpu") -> None:
        self._dtype = model.dtype
        self._head_folder = tempfile.TemporaryDirectory()
        self.target = load_model(
            str(model.target),
            dtype=model.dtype,
            device=device,
            num_threads=num_threads,
            kv_cache_dtype=model.kv_cache_dtype,
        )
        self._draft = load_model(str(model.draft), dtype=model.dtype, device=device, num_threads=num_threads)
        # What the engine is told: the grid itself is the proof, a shorter one beforehand would prove nothing more.
        self._certificate = Certificate(holds=True, checks=(), failing_operation=None, seconds=0.0)
        self._pools: dict[tuple[str, int], Pool] = {}

    def pool(self, prefill: str, num_blocks: int) -> Pool:
        key = (prefill, num_blocks)
        if key not in self._pools:
            self._pools[key] = self.start(CHUNKS[prefill], num_blocks)
        return self._pools[key]

    def draft_method(self) -> GrowingMethod:
        runner, blocks = _runner(self._draft, ROOMY_BLOCKS)
        return draft_model_method(DraftModelNet(runner, blocks, prefill_chunk_size=64), "draft")

    def head_method(self, kind: str) -> DraftMethod:
        return head_method(kind, self.target, self._dtype, Path(self._head_folder.name))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.engine.stop()
        self._pools.clear()
        self._head_folder.cleanup()

    def start(self, chunk: int, num_blocks: int, local_methods: Mapping[str, DraftMethod] | None = None) -> Pool:
        """An engine of its own, which whoever starts it stops."""
        registry = CollectorRegistry()
        limits = EngineLimits(64, _MAX_BATCHED_TOKENS, chunk, self.target.max_model_len)
        runner, blocks = _runner(self.target, num_blocks)
        metrics = VerifierMetrics(registry)
        engine = VerifierEngine(runner, blocks, limits, self._certificate, metrics, _STEP_COSTS, local_methods)
        engine.start()
        return Pool(engine, registry)


def _runner(loaded: LoadedModel, num_blocks: int) -> tuple[ModelRunner, BlockManager]:
    cache: Any = loaded.make_cache(num_blocks, BLOCK_SIZE)
    generator = torch.Generator().manual_seed(3)
    for layer in cache.layers:
        for part in (part for tensor in layer for part in parts_of(tensor)):
            garbage = _GARBAGE * torch.randn(part.shape, generator=generator)
            part.copy_(garbage.to(torch.int8).view(torch.uint8) if part.dtype == torch.uint8 else garbage)
    states = loaded.make_states(_NUM_SLOTS)
    for layer_states in states.layers if states is not None else ():
        for tensor in (layer_states.window, layer_states.state, layer_states.log):
            tensor.fill_(math.nan)
    return ModelRunner(loaded, cache, states), BlockManager(num_blocks, BLOCK_SIZE)
