"""Options of `vllm serve` that `outrider serve` does not take, each with what to do instead.

The names are those of vLLM's engine/arg_utils.py, entrypoints/openai/cli_args.py and entrypoints/cli/serve.py, also of
releases before 0.33. Not here: the options that are taken (serve.py), the keys of --speculative-config
(shared/vllm_keys.py).
"""

from __future__ import annotations

from collections.abc import Mapping

_FORMAT = "the format of a checkpoint is recognised by its files (docs/checkpoints.md); leave the option out"
_CONFIG = "the model is taken as its config.json says; change that file instead"
_TEXT_ONLY = "only text is served; leave the option out"
_PARALLEL = "the target runs on one machine, cut by --tensor-parallel-size; leave the option out"
_REPLICAS = "start a verifier per replica and list them in the gateway's --verifiers (docs/scaling.md)"
_MEMORY = "weights and KV cache stay in memory; size the cache with --kv-cache-mb"
_SCHEDULER = "the scheduler has no such choice; leave the option out"
_KERNELS = "kernels are chosen by the device; --enforce-eager turns recorded forwards off"
_LORA = "adapters are not loaded; merge them into the checkpoint"
_GRAMMAR = "llguidance serves all structured outputs; leave the option out"
_REASONING = "parsers are built in; choose one with --reasoning-parser"
_TOOLS = "parsers are built in; choose one with --tool-call-parser"
_DRAFT = 'give it as a key of --speculative-config: {"model": ..., "method": ..., "num_speculative_tokens": ...}'
_ACCEPTANCE = "every acceptance rule here is lossless; leave the option out"
_LOGGING = "set OUTRIDER_LOG_LEVEL to debug, info, warning or error; prompts and outputs are never logged"
_METRICS = "all figures are at /metrics, and a request's own in its answer; leave the option out"
_TLS = "start the services one by one and give the gateway --tls-cert-file, --tls-key-file and --tls-ca-file"
_PROXY = "put a reverse proxy before the gateway that does it"
_HTTP_LIMITS = "set the gateway's limits by environment: OUTRIDER_MAX_BODY_MB, OUTRIDER_HEADER_TIMEOUT_S"
_PLUGINS = "no code is loaded by name; leave the option out"
_POOLING = "only text generation is served; leave the option out"
_FIXED_FIELD = "the answer's fields are fixed; leave the option out"

_BY_SENTENCE: Mapping[str, tuple[str, ...]] = {
    "code from a checkpoint is never run; use a checkpoint of an architecture built into transformers": (
        *("--trust-remote-code", "--code-revision"),
    ),
    "the tokenizer is MODEL's, of the same --revision; leave the option out": ("--tokenizer-revision",),
    "downloads are kept below HF_HOME; set that variable": ("--download-dir",),
    "set the variable HF_TOKEN": ("--hf-token",),
    "only files that are read are downloaded; leave the option out": ("--ignore-patterns",),
    "the tokenizer is read from MODEL; put its tokenizer.json there": (
        *("--tokenizer", "--tokenizer-mode", "--skip-tokenizer-init", "--tokenizer-pool-size", "--tokenizer-pool-type"),
        *("--tokenizer-pool-extra-config", "--intial-incremental-detokenization-offset"),
    ),
    _FORMAT: (
        *("--load-format", "--config-format", "--model-loader-extra-config", "--safetensors-load-strategy"),
        *("--use-tqdm-on-load", "--pt-load-map-location", "--max-parallel-loading-workers", "--weight-transfer-config"),
    ),
    _CONFIG: (
        *("--hf-config-path", "--hf-overrides", "--rope-scaling", "--rope-theta", "--model-impl"),
        *("--disable-sliding-window", "--override-attention-dtype"),
    ),
    "the checkpoint says how its weights are quantised; leave the option out, or give a quantised checkpoint": (
        *("--quantization", "-q", "--quantization-param-path", "--allow-deprecated-quantization"),
        *("--qlora-adapter-name-or-path",),
    ),
    "with --kv-cache-dtype all layers have 8 bits, with scales of each token's own; leave the option out": (
        *("--calculate-kv-scales", "--kv-cache-dtype-skip-layers"),
    ),
    "recurrent states are float32, their windows and logs in the dtype of the weights; leave the option out": (
        *("--mamba-cache-dtype", "--mamba-ssm-cache-dtype", "--mamba-block-size", "--mamba-cache-mode"),
    ),
    "there is one sequence of layers per process; use --tensor-parallel-size": ("--pipeline-parallel-size", "-pp"),
    _PARALLEL: (
        *("--distributed-executor-backend", "--worker-use-ray", "--ray-workers-use-nsight", "--nnodes", "-n"),
        *("--node-rank", "-r", "--master-addr", "--master-port", "--distributed-timeout-seconds", "--headless"),
        *("--prefill-context-parallel-size", "-pcp", "--decode-context-parallel-size", "-dcp"),
        *("--dcp-kv-cache-interleave-size", "--cp-kv-cache-interleave-size", "--enable-expert-parallel", "-ep"),
        *("--dcp-comm-backend", "--all2all-backend", "--enable-eplb", "--eplb-config", "--expert-placement-strategy"),
        *("--enable-dbo", "--ubatch-size", "--dbo-decode-token-threshold", "--dbo-prefill-token-threshold"),
        *("--disable-custom-all-reduce", "--disable-nccl-for-dp-synchronization", "--numa-bind", "--numa-bind-nodes"),
        *("--numa-bind-cpus", "--enable-elastic-ep", "--enable-ep-weight-filter", "--device-ids"),
    ),
    _REPLICAS: (
        *("--data-parallel-size", "-dp", "--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr"),
        *("--data-parallel-size-local", "-dpl", "--data-parallel-address", "-dpa", "--data-parallel-rpc-port", "-dpp"),
        *("--data-parallel-backend", "-dpb", "--data-parallel-hybrid-lb", "-dph", "--data-parallel-external-lb"),
        *("-dpe",),
        *("--data-parallel-supervisor-port", "--dp-supervisor-probe-interval-s", "--dp-supervisor-probe-timeout-s"),
        *("--dp-supervisor-probe-failure-threshold", "--data-parallel-multi-port-external-lb"),
    ),
    "one gateway process serves this machine; for more, start gateways one by one (docs/scaling.md)": (
        *("--api-server-count", "-asc"),
    ),
    _MEMORY: (
        *("--swap-space", "--cpu-offload-gb", "--cpu-offload-params", "--num-gpu-blocks-override"),
        *("--kv-offloading-size", "--kv-offloading-backend", "--kv-transfer-config", "--kv-events-config"),
        *("--ec-transfer-config", "--offload-backend", "--offload-group-size", "--offload-num-in-group"),
        *("--offload-params", "--offload-prefetch-step", "--enable-sleep-mode", "--kv-sharing-fast-prefill"),
        *("--disable-hybrid-kv-cache-manager", "--prefix-caching-hash-algo", "--use-v2-block-manager"),
    ),
    _SCHEDULER: (
        *("--scheduling-policy", "--scheduler-cls", "--scheduler-delay-factor", "--scheduler-reserve-full-isl"),
        *("--max-num-partial-prefills", "--max-long-partial-prefills", "--long-prefill-token-threshold"),
        *("--num-lookahead-slots", "--num-scheduler-steps", "--multi-step-stream-outputs", "--preemption-mode"),
        *("--async-scheduling", "--disable-async-output-proc", "--stream-interval", "--performance-mode"),
        *("--shutdown-timeout", "--max-num-scheduled-tokens", "--watermark", "--disable-chunked-mm-input"),
    ),
    "prompts are always read in chunks; set the size with OUTRIDER_PREFILL_CHUNK_SIZE": ("--enable-chunked-prefill",),
    _KERNELS: (
        *("--attention-backend", "--attention-config", "-ac", "--compilation-config", "-cc", "-O"),
        *("--optimization-level", "--cudagraph-capture-sizes", "--max-cudagraph-capture-size", "--cuda-graph-sizes"),
        *("--max-seq-len-to-capture", "--disable-cascade-attn", "--kernel-config", "--enable-flashinfer-autotune"),
        *("--moe-backend", "--linear-backend", "--mamba-backend", "--gdn-prefill-backend", "--mamba-config"),
        *("--full-cuda-graph",),
    ),
    "set OUTRIDER_DEVICE to cpu or cuda": ("--device",),
    _LORA: (
        *("--enable-lora", "--enable-lora-bias", "--lora-modules", "--max-loras", "--max-lora-rank"),
        *("--lora-extra-vocab-size", "--lora-dtype", "--long-lora-scaling-factors", "--max-cpu-loras"),
        *("--fully-sharded-loras", "--default-mm-loras", "--enable-tower-connector-lora", "--specialize-active-lora"),
        *("--lora-target-modules", "--enable-prompt-adapter", "--max-prompt-adapters", "--max-prompt-adapter-token"),
        *("--prompt-adapters",),
    ),
    _TEXT_ONLY: (
        *("--limit-mm-per-prompt", "--mm-processor-kwargs", "--media-io-kwargs", "--mm-processor-cache-gb"),
        *("--mm-processor-cache-type", "--mm-shm-cache-max-object-size-mb", "--mm-encoder-only"),
        *("--mm-encoder-tp-mode",),
        *("--mm-encoder-attn-backend", "--interleave-mm-strings", "--skip-mm-profiling", "--video-pruning-rate"),
        *("--enable-mm-embeds", "--allowed-local-media-path", "--allowed-media-domains", "--language-model-only"),
        *("--disable-mm-preprocessor-cache", "--mm-tensor-ipc", "--enable-prompt-embeds", "--mm-encoder-attn-dtype"),
    ),
    _GRAMMAR: ("--guided-decoding-backend", "--structured-outputs-config", "--logits-processor-pattern"),
    _REASONING: ("--reasoning-parser-plugin", "--reasoning-config"),
    _TOOLS: (
        *("--tool-parser-plugin", "--tool-server"),
        *("--exclude-tools-when-tool-choice-none",),
    ),
    _DRAFT: (
        *("--speculative-model", "--num-speculative-tokens", "--speculative-draft-tensor-parallel-size"),
        *("-spec-draft-tp", "--speculative-max-model-len", "--ngram-prompt-lookup-max", "--ngram-prompt-lookup-min"),
        *("--speculative-model-quantization", "--speculative-disable-mqa-scorer"),
    ),
    'method "auto" drafts no more than pays at the present load; leave the option out': (
        "--speculative-disable-by-batch-size",
    ),
    _ACCEPTANCE: (
        *("--spec-decoding-acceptance-method", "--typical-acceptance-sampler-posterior-threshold"),
        *("--typical-acceptance-sampler-posterior-alpha", "--disable-logprobs-during-spec-decoding"),
    ),
    "a request may ask for up to 20 log-probabilities of the unprocessed law": ("--max-logprobs", "--logprobs-mode"),
    _LOGGING: (
        *("--uvicorn-log-level", "--log-config-file", "--max-log-len", "--enable-log-requests", "--log-error-stack"),
        *("--disable-log-requests", "--enable-log-outputs", "--enable-log-deltas", "--disable-uvicorn-access-log"),
        *("--disable-access-log-for-endpoints", "--aggregate-engine-logging", "--enable-logging-iteration-details"),
    ),
    _METRICS: (
        *("--disable-log-stats", "--show-hidden-metrics-for-version", "--kv-cache-metrics"),
        *("--kv-cache-metrics-sample",),
        *("--cudagraph-metrics", "--enable-mfu-metrics", "--enable-server-load-tracking", "--profiler-config"),
        *("--enable-per-request-metrics", "--collect-detailed-traces", "--enable-layerwise-nvtx-tracing"),
    ),
    _TLS: (
        *("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers"),
        *("--enable-ssl-refresh",),
    ),
    _PROXY: ("--uds", "--root-path"),
    _HTTP_LIMITS: ("--h11-max-incomplete-event-size", "--h11-max-header-count"),
    _PLUGINS: (
        *("--middleware", "--logits-processors", "--io-processor-plugin", "--worker-cls", "--worker-extension-cls"),
        *("--additional-config", "--override-neuron-config"),
    ),
    _POOLING: (
        *("--task", "--runner", "--convert", "--pooler-config", "--override-pooler-config"),
        *("--enable-flash-late-interaction", "--cohere-is-reasoning-model", "--cohere-format"),
    ),
    _FIXED_FIELD: (
        *("--response-role", "--enable-prompt-tokens-details", "--fingerprint-mode", "--fingerprint-value"),
        *("--enable-request-id-headers", "--tokens-only", "--enable-offline-docs"),
    ),
    "send chat_template_kwargs with each request": ("--default-chat-template-kwargs",),
    "message content is rendered as the template asks; leave the option out": ("--chat-template-content-format",),
    "a template in a request is refused; give one with --chat-template": ("--trust-request-chat-template",),
    "the gRPC server always runs; --grpc-port sets its port": ("--grpc",),
    "give the options on the command line": ("--config", "--fail-on-environ-validation"),
}
INSTEAD: Mapping[str, str] = {option: sentence for sentence, options in _BY_SENTENCE.items() for option in options}


def spelling(word: str) -> str:
    """An option's name in our spelling, without its value: vLLM also writes underscores, --no- and JSON keys after a
    dot. Words that are no options stay.
    """
    if not word.startswith("-"):
        return word
    name = word.partition("=")[0].partition(".")[0].replace("_", "-")
    if name.startswith("-O") and not name.startswith("--"):
        return "-O"
    return f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name
