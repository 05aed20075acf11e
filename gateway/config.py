"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config import setting
from shared.tracing import OTLP_TRACES_ENDPOINT_HELP


@dataclass(frozen=True)
class GatewayConfig:
    model: str = setting("", "Folder of the target's checkpoint; only its tokenizer and config are read.")
    served_model_name: str = setting("", "Name that requests use; what the verifier says if empty.")
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "HTTP port; 0 takes a free one.", minimum=0, maximum=65535)
    grpc_port: int = setting(8001, "gRPC port; 0 takes a free one, -1 serves none.", minimum=-1, maximum=65535)
    verifiers: tuple[str, ...] = setting(
        ("127.0.0.1:7001",),
        "Verifiers, host:port, comma-separated; a name with several addresses is several verifiers.",
    )
    drafters: tuple[str, ...] = setting(
        ("127.0.0.1:7002",), "Drafters, host:port, comma-separated; a name with several addresses is several drafters."
    )
    redis_url: str = setting("redis://127.0.0.1:6379/0", "The commit log.")
    redis_patience_s: float = setting(
        15.0, "Seconds that a stream waits for a Redis that does not answer before it ends with 503.", minimum=0.1
    )
    session_ttl_s: int = setting(
        3600, "Seconds that a request can be resumed and its log is kept after its last commit.", minimum=1
    )
    speculative_config: str = setting(
        "", "vLLM's JSON with method and num_speculative_tokens; hyphens in keys are underscores."
    )
    draft_timeout_ms: float = setting(500.0, "A draft that takes longer is not waited for.", minimum=1)
    draft_ahead: bool = setting(
        True,
        "Ask a drafter for the next proposal while the verifier works on this one, where rounds are measured to be "
        "shorter for it. Only for requests with a seed or at temperature 0, for chains, and for methods that draft "
        "from tokens alone.",
    )
    slo_itl_ms: float = setting(
        0.0,
        "The time from one piece of a stream to the next that should be kept to: `auto` drafts no longer than it "
        "allows. 0: whatever brings the most tokens a second. The verifier has a setting of the same name.",
        minimum=0,
    )
    hedge_drafters: bool = setting(
        False,
        "Ask a second drafter when the first takes longer than 95 % of the answers did; the first answer is used. Only "
        "for requests with a seed or at temperature 0, and for methods that draft from tokens alone.",
    )
    failover_s: float = setting(30.0, "Seconds that a session waits for another verifier.", minimum=0)
    numerics: str = setting(
        "",
        "The kind of verifier that requests with a seed, or at temperature 0, go to, as GetInfo and the verifier's log "
        "tell it. Empty: the most common kind of the fleet. One that began with a kind never moves to another.",
    )
    max_queued_commits: int = setting(64, "Commits a slow reader may be behind before its session pauses.", minimum=1)
    max_body_mb: float = setting(4.0, "Largest request body, in MiB.", minimum=0.01)
    max_n: int = setting(128, "Largest n of a request.", minimum=1)
    api_keys_file: str = setting(
        "", "File of API keys, read again on SIGHUP; empty: everyone may ask. `outrider key new NAME` makes a line."
    )
    protect_metrics: bool = setting(False, "/metrics asks for an API key too; /health and /ready never do.")
    max_concurrent_requests: int = setting(
        512, "Requests that run or wait, both doors together; more are refused with 503.", minimum=1
    )
    max_connections: int = setting(1024, "HTTP connections at a time; more are refused with 503.", minimum=1)
    header_timeout_s: float = setting(10.0, "Seconds in which a request's headers must arrive.", minimum=0.1)
    body_timeout_s: float = setting(60.0, "Seconds in which a request's body must arrive.", minimum=0.1)
    slow_reader_timeout_s: float = setting(
        60.0, "Seconds that a client may leave its stream unread before it is cut.", minimum=0.1
    )
    tls_cert_file: str = setting("", "Certificate of both doors (PEM); empty: no TLS.")
    tls_key_file: str = setting("", "Its private key.")
    tls_ca_file: str = setting("", "Clients must present a certificate that this authority has signed.")
    tls_probe_cert_file: str = setting(
        "", "Certificate that shared.healthcheck presents to doors that ask for one; empty: the doors' own."
    )
    tls_probe_key_file: str = setting("", "Its private key.")
    fleet_tls_ca_file: str = setting("", "The fleet is reached by TLS, and verified against this authority.")
    fleet_tls_cert_file: str = setting("", "Certificate that is presented to verifiers and drafters.")
    fleet_tls_key_file: str = setting("", "Its private key.")
    reflection: bool | None = setting(None, "gRPC reflection; auto: on loopback only.")
    api_docs: bool | None = setting(None, "/docs and /openapi.json; auto: on loopback only.")
    playground: bool = setting(True, "The page at /. Its requests need an API key where all others do.")
    per_request_spec_decode_metrics: str = setting(
        "summary", "Speculation figures in responses.", choices=("none", "summary", "detailed")
    )
    drain_s: float = setting(30.0, "Seconds that running requests may go on after SIGTERM.", minimum=0)
    otlp_traces_endpoint: str = setting("", OTLP_TRACES_ENDPOINT_HELP)
    log_level: str = setting("info", "Log level.", choices=("debug", "info", "warning", "error"))
