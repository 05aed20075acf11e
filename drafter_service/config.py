"""Settings of the drafter service."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.drafting.settings import MethodSettings
from outrider.shared.config import setting
from outrider.shared.settings import ServiceSettings


@dataclass(frozen=True)
class DrafterConfig(MethodSettings, ServiceSettings):
    port: int = setting(7002, "gRPC port; 0 picks a free one.", minimum=0, maximum=65535)
    engine_keys_file: str = setting(
        "",
        "File of API keys (`outrider key new`); every call needs one of them, with the key's limit of concurrent "
        "requests as its quota of sessions. Outrider's own gateways send none: they have certificates.",
    )
    max_sessions_per_peer: int = setting(
        0,
        "Most sessions of a key, or of an address where no key is required; 0: only --max-num-seqs limits.",
        minimum=0,
    )
    allow_draft_loading: bool = setting(
        False,
        "Whoever can call the drafter may have it load other weights (`outrider load-draft`); beyond loopback with "
        "--tls-ca-file only.",
    )
    drain_s: float = setting(10.0, "Seconds that running sessions may continue after SIGTERM.", minimum=0)
