"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.gateway.tool_calls.formats import CALLS, NONE, REASONING
from outrider.shared.config import setting
from outrider.shared.listening import grpc_port_of
from outrider.shared.settings import CommonSettings


@dataclass(frozen=True)
class GatewayConfig(CommonSettings):
    model: str = setting(
        "", "The target: checkpoint folder or Hub id (ORG/NAME@REVISION); only tokenizer and config are read."
    )
    served_model_name: str = setting("", "Model name in requests; empty: the verifier's.")
    chat_template: str = setting("", "File of a chat template, or the template itself; empty: the checkpoint's.")
    tool_call_parser: str = setting(
        "auto",
        "How the model writes tool calls, by vLLM's names; auto: recognised from the chat template.",
        choices=("auto", NONE, *sorted(CALLS)),
    )
    reasoning_parser: str = setting(
        "auto",
        "How the model marks its reasoning, by vLLM's names; auto: recognised from the chat template.",
        choices=("auto", NONE, *sorted(REASONING)),
    )
    reasoning_field: str = setting(
        "reasoning",
        "Field of messages and deltas that holds the reasoning.",
        choices=("reasoning", "reasoning_content"),
    )
    return_tokens_as_token_ids: bool = setting(
        False, "Log-probabilities name tokens as token_id:N, where a request does not say."
    )
    enable_force_include_usage: bool = setting(False, "Streams have the usage in every event, unasked.")
    enable_tokenizer_info_endpoint: bool = setting(
        False, "/tokenizer_info: the checkpoint's tokenizer_config.json and chat template."
    )
    generation_config: str = setting(
        "auto",
        "Folder whose generation_config.json has the sampling defaults of HTTP requests that leave temperature, top_p, "
        "top_k, min_p, repetition_penalty or a chat's max_tokens out; auto: the model's; vllm: none.",
    )
    override_generation_config: str = setting(
        "",
        "JSON object of sampling defaults that replace single ones of --generation-config; max_new_tokens, there or in "
        "a folder given here, also limits every request.",
    )
    port: int = setting(8000, "HTTP port; 0 picks a free one.", minimum=0, maximum=65535)
    grpc_port: int | None = setting(
        None,
        "gRPC port; auto: the one after --port; 0 picks a free one, -1: no gRPC server.",
        minimum=-1,
        maximum=65535,
    )
    verifiers: tuple[str, ...] = setting(
        ("127.0.0.1:7001",),
        "Verifiers, host:port, comma-separated; a name with several addresses is several verifiers.",
    )
    drafters: tuple[str, ...] = setting(
        ("127.0.0.1:7002",), "Drafters, host:port, comma-separated; a name with several addresses is several drafters."
    )
    redis_url: str = setting("redis://127.0.0.1:6379/0", "Redis for the commit log.")
    redis_patience_s: float = setting(
        15.0, "Seconds that a stream waits for an unresponsive Redis before it ends with 503.", minimum=0.1
    )
    session_ttl_s: int = setting(
        600, "Seconds after its last commit during which an unfinished request can be resumed.", minimum=1
    )
    ended_ttl_s: int = setting(
        120,
        "Seconds after its end, and before its first token, during which a request can be resumed; at most "
        "--session-ttl-s.",
        minimum=1,
    )
    max_log_mb: float = setting(
        256.0,
        "What this gateway's requests may hold in Redis, in MiB, an API key a quarter of it; further ones are refused "
        "until some have expired. Redis needs about twice that of all gateways.",
        minimum=1,
    )
    stored_response_ttl_s: int = setting(
        3600,
        "Seconds that a response of /v1/responses is kept in Redis for previous_response_id and GET, unless its "
        "request says store: false; 0: none is stored.",
        minimum=0,
    )
    max_stored_mb: float = setting(
        64.0,
        "What this gateway's stored responses may hold in Redis, in MiB, besides --max-log-mb, an API key a quarter of "
        "it; further ones are refused until some have expired.",
        minimum=1,
    )
    speculative_config: str = setting(
        "", "vLLM's JSON with method and num_speculative_tokens; keys may use hyphens or underscores."
    )
    draft_timeout_ms: float = setting(500.0, "Maximum wait for a draft, in milliseconds.", minimum=1)
    draft_ahead: bool = setting(
        True,
        "Ask a drafter for the next proposal while the verifier works on this one, if that measurably shortens rounds. "
        "Only for requests with a seed or at temperature 0, for chains, and for methods that draft from tokens alone.",
    )
    slo_itl_ms: float = setting(
        0.0,
        "Inter-token latency target, in milliseconds: `auto` limits draft length to meet it. 0: maximise throughput. "
        "The verifier has a setting of the same name.",
        minimum=0,
    )
    failover_s: float = setting(30.0, "Seconds that a session waits for another verifier.", minimum=0)
    numerics: str = setting(
        "",
        "Kind of verifier for requests with a seed or at temperature 0, as reported by GetInfo and the verifier's log. "
        "Empty: the fleet's most common kind. A request never changes its kind.",
    )
    max_queued_commits: int = setting(64, "Commits a slow reader may lag behind before its session pauses.", minimum=1)
    max_body_mb: float = setting(4.0, "Largest request body, in MiB.", minimum=0.01)
    max_n: int = setting(128, "Largest n of a request.", minimum=1)
    receipt_key: str = setting(
        "",
        "File of the Ed25519 private key (PEM) that receipts are signed with, the same at every gateway; empty: they "
        "are not signed.",
    )
    api_keys_file: str = setting(
        "", "File of API keys, reloaded on SIGHUP; empty: no key required. `outrider key new NAME` makes a line."
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Names in Host headers, comma-separated, that a server on loopback without API keys answers to, besides "
        "addresses, localhost and names without a dot; for a proxy on this machine.",
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "Origins of pages that may call the HTTP server from a browser (CORS), comma-separated; *: all."
    )
    allowed_methods: tuple[str, ...] = setting(("*",), "Methods that those pages may use, comma-separated.")
    allowed_headers: tuple[str, ...] = setting(("*",), "Headers that those pages may send, comma-separated.")
    allow_credentials: bool = setting(False, "Those pages may send cookies and other credentials of the browser.")
    protect_metrics: bool = setting(False, "Require an API key for /metrics too; /health and /ready never need one.")
    max_concurrent_requests: int = setting(
        1024,
        "Running and waiting requests, HTTP and gRPC together; more are refused with 503, those of a caller who has as "
        "many as are free with 429.",
        minimum=1,
    )
    max_connections: int = setting(
        1024, "Concurrent connections, of each server: HTTP refuses more with 503, gRPC closes them.", minimum=1
    )
    header_timeout_s: float = setting(10.0, "Seconds within which a request's headers must arrive.", minimum=0.1)
    body_timeout_s: float = setting(60.0, "Seconds within which a request's body must arrive.", minimum=0.1)
    slow_reader_timeout_s: float = setting(
        60.0, "Seconds that a client may leave its stream unread before it is disconnected.", minimum=0.1
    )
    tls_probe_cert_file: str = setting(
        "", "Client certificate of shared.healthcheck, if the servers require one; empty: the servers' own."
    )
    tls_probe_key_file: str = setting("", "Private key of the probe's certificate.")
    fleet_tls_ca_file: str = setting("", "Use TLS to the fleet and verify it against this CA certificate.")
    fleet_tls_cert_file: str = setting("", "Client certificate for verifiers and drafters.")
    fleet_tls_key_file: str = setting("", "Private key of that certificate.")
    api_docs: bool | None = setting(None, "/docs and /openapi.json; auto: on loopback only.")
    playground: bool = setting(True, "The page at /. Its requests need an API key if all others do.")
    per_request_spec_decode_metrics: str = setting(
        "summary", "Speculation figures in responses.", choices=("none", "summary", "detailed")
    )
    check_only: bool = setting(
        False, "Look at the settings and the files they name, start nothing, and exit with 0, or with 2 and the reason."
    )

    @property
    def client_grpc_port(self) -> int:
        """Raises ConfigError."""
        return grpc_port_of(self.grpc_port, self.port)
