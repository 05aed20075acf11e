"""The mapping of `vllm serve`'s options that `outrider serve` does not have itself: each is the same as one of ours,
ignored because no text of an answer depends on it, or refused with what to do instead.

The names are those of vLLM's engine/arg_utils.py, entrypoints/openai/cli_args.py and entrypoints/cli/serve.py, also of
releases before 0.33. Not here: the options that are taken (serve.py), the keys of --speculative-config
(shared/vllm_keys.py), how a line is read (foreign_options.py).
"""

from __future__ import annotations

from outrider.client.cli.foreign_options import OptionTable, by_option

_ONE_COPY = "one copy of the target per verifier, cut by --tensor-parallel-size; docs/scaling.md has more verifiers"
_TEXT_ONLY = "only text is served; leave the option out"
_CONFIG = "the model is taken as its config.json says; change that file instead"
_TOKENIZER = "the tokenizer is MODEL's, of the same --revision; put its tokenizer.json there"
_PLUGINS = "no code is loaded by name; leave the option out"
_HEADLESS = "one machine serves; start `outrider serve` without --headless on one, and see docs/scaling.md for more"

IGNORED = by_option(
    {
        "code from a checkpoint is never run": "--trust-remote-code --code-revision",
        "set the seed per request": "--seed",
        "size the KV cache with --kv-cache-mb": "--num-gpu-blocks-override",
        "always on": "--enable-auto-tool-choice --enable-chunked-prefill",
        "downloads are kept below HF_HOME": "--download-dir --ignore-patterns",
        "the tokenizer is read from MODEL's files": """--tokenizer-mode --tokenizer-pool-size --tokenizer-pool-type
            --tokenizer-pool-extra-config""",
        "a checkpoint's format is recognised by its files": """--config-format --model-loader-extra-config --load-format
            --safetensors-load-strategy --use-tqdm-on-load --pt-load-map-location --max-parallel-loading-workers
            --model-impl""",
        "the checkpoint's files say how its weights are quantised": "--allow-deprecated-quantization",
        "each token and head has scales of its own": "--calculate-kv-scales",
        "recurrent states are float32": """--mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size
            --mamba-cache-mode""",
        _ONE_COPY: """--pipeline-parallel-size -pp --distributed-executor-backend --worker-use-ray --nnodes --node-rank
            --ray-workers-use-nsight --master-addr --master-port --distributed-timeout-seconds -pcp -dcp -ep
            --prefill-context-parallel-size --decode-context-parallel-size --dcp-kv-cache-interleave-size
            --cp-kv-cache-interleave-size --enable-expert-parallel --dcp-comm-backend --all2all-backend --enable-eplb
            --eplb-config --expert-placement-strategy --enable-dbo --ubatch-size --dbo-decode-token-threshold
            --dbo-prefill-token-threshold --disable-custom-all-reduce --disable-nccl-for-dp-synchronization --numa-bind
            --numa-bind-nodes --numa-bind-cpus --enable-elastic-ep --enable-ep-weight-filter --device-ids
            --data-parallel-size -dp --data-parallel-rank -dpn --data-parallel-start-rank -dpr -dpl -dpa -dpp -dpb -dph
            --data-parallel-size-local --data-parallel-address --data-parallel-rpc-port --data-parallel-backend -dpe
            --data-parallel-hybrid-lb --data-parallel-external-lb --data-parallel-supervisor-port
            --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold
            --data-parallel-multi-port-external-lb --api-server-count -asc --weight-transfer-config""",
        "weights and KV cache stay in memory": """--swap-space --cpu-offload-gb --cpu-offload-params --offload-params
            --kv-offloading-size --kv-offloading-backend --kv-transfer-config --kv-events-config --ec-transfer-config
            --offload-backend --offload-group-size --offload-num-in-group --offload-prefetch-step --enable-sleep-mode
            --kv-sharing-fast-prefill --disable-hybrid-kv-cache-manager --prefix-caching-hash-algo
            --use-v2-block-manager""",
        "the scheduler has no such choice": """--scheduling-policy --scheduler-cls --scheduler-delay-factor
            --scheduler-reserve-full-isl --max-num-partial-prefills --max-long-partial-prefills --watermark
            --long-prefill-token-threshold --num-lookahead-slots --num-scheduler-steps --multi-step-stream-outputs
            --preemption-mode --async-scheduling --disable-async-output-proc --stream-interval --performance-mode
            --shutdown-timeout --max-num-scheduled-tokens --disable-chunked-mm-input""",
        "kernels are chosen by the device": """--attention-backend --attention-config -ac --compilation-config -cc -O
            --optimization-level --cudagraph-capture-sizes --max-cudagraph-capture-size --cuda-graph-sizes
            --max-seq-len-to-capture --disable-cascade-attn --kernel-config --enable-flashinfer-autotune --moe-backend
            --linear-backend --mamba-backend --gdn-prefill-backend --mamba-config --full-cuda-graph --device
            --additional-config --override-neuron-config""",
        "only text is served": """--mm-processor-cache-gb --mm-processor-cache-type --mm-shm-cache-max-object-size-mb
            --mm-encoder-tp-mode --mm-encoder-attn-backend --mm-encoder-attn-dtype --mm-tensor-ipc --skip-mm-profiling
            --disable-mm-preprocessor-cache --language-model-only --limit-mm-per-prompt""",
        "llguidance serves all structured outputs": "--guided-decoding-backend --structured-outputs-config",
        "parsers are built in": "--reasoning-parser-plugin --tool-parser-plugin",
        "every acceptance rule here is lossless": """--speculative-disable-mqa-scorer --speculative-model-quantization
            --spec-decoding-acceptance-method --disable-logprobs-during-spec-decoding""",
        'method "auto" drafts no more than pays at the present load': "--speculative-disable-by-batch-size",
        "a request may ask for up to 20 log-probabilities of the unprocessed law": "--max-logprobs --logprobs-mode",
        "OUTRIDER_LOG_LEVEL sets what is logged, never prompts nor outputs": """--uvicorn-log-level --log-config-file
            --max-log-len --enable-log-requests --log-error-stack --disable-log-requests --enable-log-outputs
            --enable-log-deltas --disable-uvicorn-access-log --disable-access-log-for-endpoints
            --aggregate-engine-logging --enable-logging-iteration-details""",
        "all figures are at /metrics, and a request's own in its answer": """--disable-log-stats --kv-cache-metrics
            --show-hidden-metrics-for-version --kv-cache-metrics-sample --cudagraph-metrics --enable-mfu-metrics
            --enable-server-load-tracking --profiler-config --collect-detailed-traces
            --enable-layerwise-nvtx-tracing""",
        "times are at /metrics, and a request's figures of speculation in its answer": "--enable-per-request-metrics",
        "OUTRIDER_MAX_BODY_MB and OUTRIDER_HEADER_TIMEOUT_S limit requests": """--h11-max-incomplete-event-size
            --h11-max-header-count""",
        "the answer's fields are fixed": """--enable-prompt-tokens-details --fingerprint-mode --fingerprint-value
            --enable-request-id-headers --enable-offline-docs""",
        "message content is rendered as the template asks": "--chat-template-content-format",
        "the gRPC server always runs, at --grpc-port": "--grpc",
        "the environment is always checked": "--fail-on-environ-validation",
        "text is generated": "--task --runner --convert",
        "the first of the target's MTP layers drafts all tokens": "--hf-overrides",
    }
)
REFUSED = by_option(
    {
        "adapters are not loaded; merge them into the checkpoint": """--enable-lora --enable-lora-bias --lora-modules
            --max-loras --max-lora-rank --lora-extra-vocab-size --lora-dtype --long-lora-scaling-factors --max-cpu-loras
            --fully-sharded-loras --default-mm-loras --enable-tower-connector-lora --specialize-active-lora
            --lora-target-modules --enable-prompt-adapter --max-prompt-adapters --max-prompt-adapter-token
            --prompt-adapters --qlora-adapter-name-or-path""",
        "only text generation is served; leave the option out": """--task --runner --convert --pooler-config
            --override-pooler-config --enable-flash-late-interaction --cohere-is-reasoning-model --cohere-format
            --io-processor-plugin --tokens-only""",
        "weights are not quantised at load; give a quantised checkpoint": "--quantization-param-path",
        _TEXT_ONLY: """--limit-mm-per-prompt --mm-processor-kwargs --media-io-kwargs --mm-encoder-only
            --interleave-mm-strings --video-pruning-rate --enable-mm-embeds --allowed-local-media-path
            --allowed-media-domains --enable-prompt-embeds --omni""",
        _CONFIG: """--hf-config-path --hf-overrides --rope-scaling --rope-theta --disable-sliding-window
            --override-attention-dtype""",
        _TOKENIZER: """--tokenizer --tokenizer-revision --skip-tokenizer-init
            --intial-incremental-detokenization-offset""",
        "give a checkpoint with weights": "--load-format",
        "set the variable HF_TOKEN": "--hf-token",
        "with --kv-cache-dtype all layers have 8 bits; leave the option out": "--kv-cache-dtype-skip-layers",
        _HEADLESS: "--headless --node-rank --data-parallel-start-rank",
        "set OUTRIDER_DEVICE to auto, cpu or cuda": "--device",
        "llguidance serves all structured outputs, and has no such setting": """--structured-outputs-config
            --logits-processor-pattern""",
        "parsers are built in; choose one with --reasoning-parser": "--reasoning-config",
        "tools are run by the client; leave the option out": "--tool-server --exclude-tools-when-tool-choice-none",
        "every acceptance rule here is lossless; leave the option out": """--spec-decoding-acceptance-method
            --typical-acceptance-sampler-posterior-threshold --typical-acceptance-sampler-posterior-alpha""",
        "a request may ask for up to 20 log-probabilities of the unprocessed law": "--max-logprobs --logprobs-mode",
        "start the services one by one and give the gateway --tls-cert-file, --tls-key-file and --tls-ca-file": """
            --ssl-certfile --ssl-keyfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh""",
        "put a reverse proxy before the gateway that does it": "--uds --root-path",
        _PLUGINS: "--middleware --logits-processors --worker-cls --worker-extension-cls",
        "the answer's role is assistant; leave the option out": "--response-role",
        "send chat_template_kwargs with each request": "--default-chat-template-kwargs",
        "a template in a request is refused; give one with --chat-template": "--trust-request-chat-template",
        "give the options on the command line": "--config",
        "it is --nnodes in vLLM and --predict in llama-server; give the long name": "-n",
        "it is --node-rank in vLLM and --reverse-prompt in llama-server; give the long name": "-r",
    }
)
_FLAGS = """
--trust-remote-code --enable-auto-tool-choice --enable-chunked-prefill --use-tqdm-on-load --enable-sleep-mode
--allow-deprecated-quantization --calculate-kv-scales --worker-use-ray --ray-workers-use-nsight -ep --numa-bind
--enable-expert-parallel --enable-eplb --enable-dbo --disable-custom-all-reduce --disable-nccl-for-dp-synchronization
--enable-elastic-ep --enable-ep-weight-filter -dph --data-parallel-hybrid-lb --data-parallel-external-lb -dpe
--data-parallel-multi-port-external-lb --kv-sharing-fast-prefill --disable-hybrid-kv-cache-manager
--use-v2-block-manager --scheduler-reserve-full-isl --multi-step-stream-outputs --async-scheduling
--disable-async-output-proc --disable-chunked-mm-input --disable-cascade-attn --enable-flashinfer-autotune
--full-cuda-graph --skip-mm-profiling --disable-mm-preprocessor-cache --language-model-only
--speculative-disable-mqa-scorer --disable-logprobs-during-spec-decoding --enable-log-requests --log-error-stack
--disable-log-requests --enable-log-outputs --enable-log-deltas --disable-uvicorn-access-log --aggregate-engine-logging
--enable-logging-iteration-details --disable-log-stats --kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics
--enable-server-load-tracking --enable-per-request-metrics --enable-layerwise-nvtx-tracing
--enable-prompt-tokens-details --enable-request-id-headers --enable-offline-docs --grpc --fail-on-environ-validation
"""
# Option -> values (a regular expression) with which nothing that is served differs.
_ONLY = {
    "--task": "auto|generate",
    "--runner": "auto|generate",
    "--convert": "auto|none",
    "--load-format": "(?!dummy).*",
    "--node-rank": "0",
    "--data-parallel-start-rank": "0",
    "--device": "auto",
    "--max-logprobs": "[0-9]|1[0-9]|20",
    "--logprobs-mode": "raw_logprobs",
    "--spec-decoding-acceptance-method": "rejection_sampler",
    # No image, no video: 0, image=0, {"image": 0, "video": 0}.
    "--limit-mm-per-prompt": r"""[{\s]*(["\w]+\s*[:=]\s*)?0([,\s]+["\w]+\s*[:=]\s*0)*[}\s]*""",
    "--hf-overrides": r"""{\s*"num_nextn_predict_layers"\s*:\s*[1-9]\d?\s*}""",
    "--structured-outputs-config": r"""[a-z-]+|{\s*"backend"\s*:\s*"[a-z-]+"\s*}""",
}
VLLM = OptionTable(
    "vLLM",
    # vLLM's options before --speculative-config
    same={
        "--speculative-model": "--speculative-config.model",
        "--num-speculative-tokens": "--speculative-config.num_speculative_tokens",
        "--ngram-prompt-lookup-max": "--speculative-config.prompt_lookup_max",
        "--ngram-prompt-lookup-min": "--speculative-config.prompt_lookup_min",
        "--speculative-max-model-len": "--speculative-config.max_model_len",
        "--speculative-draft-tensor-parallel-size": "--speculative-config.draft_tensor_parallel_size",
        "-spec-draft-tp": "--speculative-config.draft_tensor_parallel_size",
    },
    ignored=IGNORED,
    refused=REFUSED,
    flags=frozenset(_FLAGS.split()),
    lists=frozenset(("--cudagraph-capture-sizes", "--cuda-graph-sizes", "--device-ids", "--ignore-patterns")),
    only=_ONLY,
)
