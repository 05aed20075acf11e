"""Settings of the drafter service."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.drafting.settings import MethodSettings
from outrider.shared.config import setting
from outrider.shared.service import ServiceSettings


@dataclass(frozen=True)
class DrafterConfig(MethodSettings, ServiceSettings):
    port: int = setting(7002, "gRPC port; 0 picks a free one.", minimum=0, maximum=65535)
    drain_s: float = setting(10.0, "Seconds that running sessions may continue after SIGTERM.", minimum=0)
