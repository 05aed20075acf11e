"""The engine that Dynamo's worker drives: tokens in, tokens out, by way of Outrider's gateways."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm import HttpError
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from outrider.plugins.dynamo.gateways import Gateways
from outrider.plugins.dynamo.options import parser
from outrider.plugins.dynamo.request import Chunks, completion
from outrider.shared.errors import OutriderError, Unavailable

# seconds; between two looks at the fleet's KV cache
_LOAD_S = 1.0


class Config(DynamoRuntimeConfig):  # type: ignore[misc]
    """Dynamo's own options, with ours."""

    component: str
    model: str
    served_model_name: str | None
    gateway: list[str]
    patience_s: float


def full_parser() -> argparse.ArgumentParser:
    made = parser()
    DynamoRuntimeArgGroup().add_arguments(made)
    return made


class Engine(LLMEngine):  # type: ignore[misc]
    """Dynamo's contract is in its LLMEngine. One worker is one data-parallel rank: all of the gateways' fleet."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._gateways = Gateways(config.gateway, config.patience_s)
        self._model = ""
        self._context_length = 0
        self._publisher: Any = None
        self._publishing: asyncio.Task[None] | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Engine, Any]:
        config = Config.from_cli_args(full_parser().parse_args(argv))
        config.validate()
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log each look at the fleet
        engine = cls(config)
        card = await engine._gateways.model_card()
        engine._model, engine._context_length = str(card["id"]), int(card["max_model_len"])
        worker = WorkerConfig.from_runtime_config(
            config,
            model_name=config.model,
            served_model_name=config.served_model_name or engine._model,
            disaggregation_mode=DisaggregationMode.AGGREGATED,
            structural_tag=None,  # a form of grammar that gateways do not have: forced calls come as a JSON schema
        )
        return engine, worker

    async def start(self, worker_id: int) -> Any:
        capacity = await self._gateways.capacity()
        llm = LlmRegistration(context_length=self._context_length)
        if capacity is not None:
            llm.kv_cache_block_size, llm.total_kv_blocks = capacity.block_size, capacity.num_blocks
            llm.max_num_seqs = capacity.max_sessions
        if self._publishing is None:
            self._publishing = asyncio.create_task(self._publish_load())
        served = self._config.served_model_name or self._model
        return EngineConfig(model=self._config.model, served_model_name=served, llm=llm)

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        try:
            normalize_request_token_ids(request)
            body = completion(request, context.id(), self._model, self._context_length)
            chunks = Chunks(body["prompt"])
            async with aclosing(self._gateways.events(body)) as events:
                async for event in events:
                    for chunk in chunks.of(event):
                        yield chunk
        except OutriderError as error:
            raise _as_dynamo(error) from error

    async def health_check_payload(self) -> Any:
        return build_health_check_payload(bos_token_id=0)

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._publisher = publisher

    async def cleanup(self) -> None:
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)
        await self._gateways.close()

    async def _publish_load(self) -> None:
        """For Dynamo's router and gauges: how full the KV cache is."""
        while True:
            await asyncio.sleep(_LOAD_S)
            capacity = await self._gateways.capacity()
            if self._publisher is None or capacity is None or not capacity.num_blocks:
                continue
            used = capacity.num_blocks - capacity.num_free_blocks
            self._publisher.publish(
                0,
                ComponentSnapshot(
                    kv_used_blocks=used,
                    kv_total_blocks=capacity.num_blocks,
                    gpu_cache_usage=used / capacity.num_blocks,
                    dp_rank=0,
                ),
            )


def _as_dynamo(error: OutriderError) -> Any:
    """The exception for Dynamo's frontend. Of these it migrates EngineShutdown: another worker may reach a gateway."""
    if isinstance(error, Unavailable):
        return EngineShutdown(error.message)
    if error.http_status == 400:
        return InvalidArgument(error.message)
    return HttpError(error.http_status, error.message)
