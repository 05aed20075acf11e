"""What a scrape says of the KV cache: blocks that sessions hold, and not those that are merely cached."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from outrider.engine.attention.block_manager import BlockManager
from outrider.verifier_service.metrics import VerifierMetrics

TOKENS = tuple(range(64))


def test_cached_blocks_that_nobody_holds_are_not_in_use() -> None:
    registry = CollectorRegistry()
    blocks = BlockManager(16, 16)
    VerifierMetrics(registry).watch(lambda: 0, lambda: 0, blocks)
    table, _ = blocks.open(TOKENS)
    blocks.grow(table, len(TOKENS))
    blocks.register(table, TOKENS, len(TOKENS))
    assert registry.get_sample_value("outrider:kv_cache_usage_perc") == 4 / 16
    blocks.close(table)
    again, num_cached = blocks.open(TOKENS)
    assert num_cached == 48  # they are still there
    blocks.close(again)
    assert registry.get_sample_value("outrider:kv_cache_usage_perc") == 0.0
