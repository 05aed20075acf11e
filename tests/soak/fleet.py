"""The stack that is soaked: chaos' fleet without proxies. What is bounded in it has small bounds, so that they are met
in minutes: a cache that fills for an hour looks like a leak.
"""

from __future__ import annotations

from pathlib import Path

from tests.chaos.fleet import Fleet, Part
from tests.chaos.targets import MODELS
from tests.ports import server_port

# Every method that the drafters serve: a draft model, a head that reads hidden states, and lookups.
METHODS = ("draft_model", "eagle3", "ngram", "suffix")


class SoakFleet(Fleet):
    def __init__(self, run_dir: Path, *, num_drafters: int, session_ttl_s: int) -> None:
        super().__init__(run_dir, num_gateways=1, num_drafters=num_drafters, num_verifiers=1)
        self.session_ttl_s = session_ttl_s
        self.grpc_address = f"127.0.0.1:{server_port()}"

    async def _expose(self, part: Part) -> None:
        """Reached as it is: nothing stands between."""

    def _address(self, part: Part) -> str:
        return f"{part.host}:{part.port}"

    def _service_command(self, kind: str, index: int) -> list[str]:
        target = str(MODELS / "demo-target")
        if kind == "verifier":
            return ["outrider.verifier_service", "--model", target, "--kv-cache-mb", "32"]
        drafts = ",".join(str(MODELS / name) for name in ("demo-draft", "demo-eagle3"))
        return [
            *(
                "outrider.drafter_service",
                "--target-model",
                target,
                "--draft-model",
                drafts,
                "--methods",
                ",".join(METHODS),
            ),
            *("--num-threads", "1", "--kv-cache-mb", "16", "--suffix-decoding-max-cached-nodes", "20000"),
        ]

    def _gateway_command(self) -> list[str]:
        grpc_port = self.grpc_address.rpartition(":")[2]
        return [*super()._gateway_command(), "--grpc-port", grpc_port, "--session-ttl-s", str(self.session_ttl_s)]
