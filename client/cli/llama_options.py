"""The mapping of `llama-server`'s options, short and long, for `outrider serve`: those that mean one of ours are taken,
those that no text depends on are ignored, the others are refused with what to do instead.

The names are those of llama.cpp's tools/server/README.md. Not here: names that vLLM has too (vllm_options.py), how a
line is read (foreign_options.py).
"""

from __future__ import annotations

from outrider.client.cli.foreign_options import OptionTable, by_option

_DRAFT, _SAMPLING = "--speculative-config", "--override-generation-config"

# our name -> llama-server's names
_SAME = {
    "--model": "-m -hf -hfr --hf-repo",
    "--served-model-name": "-a --alias",
    "--max-model-len": "-c --ctx-size",
    "--max-num-seqs": "-np --parallel",
    "--max-num-batched-tokens": "-b --batch-size",
    "--chat-template": "--chat-template-file",
    f"{_DRAFT}.model": "-md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --spec-draft-hf",
    f"{_DRAFT}.num_speculative_tokens": "--spec-draft-n-max --draft --draft-n --draft-max",
    f"{_SAMPLING}.temperature": "--temp --temperature",
    f"{_SAMPLING}.top_k": "--top-k",
    f"{_SAMPLING}.top_p": "--top-p",
    f"{_SAMPLING}.min_p": "--min-p",
    f"{_SAMPLING}.repetition_penalty": "--repeat-penalty",
    f"{_SAMPLING}.max_new_tokens": "--predict --n-predict",
}
_IGNORED = by_option(
    {
        "set the seed per request": "-s",
        "OUTRIDER_NUM_THREADS sets the threads; all cores by default": """-t --threads -tb --threads-batch -td -tbd
            --threads-draft --threads-batch-draft --spec-draft-threads --spec-draft-threads-batch --threads-http -C
            --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch
            --cpu-strict-batch --prio-batch --poll-batch --numa --spec-draft-cpu-mask -Cd --cpu-mask-draft
            --spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio
            --prio-draft --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft
            --spec-draft-cpu-strict-batch --cpu-strict-batch-draft --spec-draft-prio-batch --prio-batch-draft
            --spec-draft-poll-batch --poll-batch-draft""",
        "the whole model is on OUTRIDER_DEVICE": """-ngl --gpu-layers --n-gpu-layers -ngld --gpu-layers-draft
            --n-gpu-layers-draft --spec-draft-ngl -sm --split-mode -ts --tensor-split -mg --main-gpu -dev -devd
            --device-draft --spec-draft-device -ot --override-tensor -otd --override-tensor-draft -cmoe --cpu-moe -ncmoe
            --n-cpu-moe --moe-cache-mib -ncffn --n-cpu-ffn --op-offload --no-host -kvo --kv-offload -nkvo --rpc
            --spec-draft-override-tensor --spec-draft-cpu-moe -cmoed --cpu-moe-draft --spec-draft-n-cpu-moe
            --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft""",
        "size the KV cache with --kv-cache-mb": """-fit --fit -fitt --fit-target -fitc --fit-ctx -cram --cache-ram -kvu
            --kv-unified -no-kvu --kv-unified-per-slot --swa-full -dt --defrag-thold""",
        "weights stay in memory": """--mlock --mmap --no-mmap -lm --load-mode -lzm --lazy-mode --repack -nr --warmup
            --sleep-idle-seconds""",
        "kernels are chosen by the device": "-fa --flash-attn -ub --ubatch-size --backend-sampling -bs",
        "always on": """--jinja -cb --cont-batching -nocb --metrics --cache-prompt --check-tensors --ui --webui
            --prefill-assistant""",
        "equal beginnings of prompts are kept, block by block": """--cache-reuse --cache-idle-slots -ctxcp
            --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step -sps --slot-prompt-similarity --keep""",
        "only text is served": """--no-mmproj --mmproj-auto --no-mmproj-auto --mmproj-offload -mmdev --mmproj-device
            --image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps --video-timestamp-interval
            --video-ffmpeg-dir""",
        "no text depends on how a draft is made": """--spec-draft-n-min --draft-min --draft-n-min --spec-draft-p-min
            --draft-p-min --spec-draft-p-split --draft-p-split --spec-draft-sampling --spec-draft-backend-sampling -ctkd
            --cache-type-k-draft --spec-draft-type-k -ctvd --cache-type-v-draft --spec-draft-type-v -cd
            --ctx-size-draft --spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match
            --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-size-n
            --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-size-m
            --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits
            --spec-ngram-min-hits""",
        "OUTRIDER_LOG_LEVEL sets what is logged": """-v --verbose --log-verbose -lv --verbosity --log-verbosity
            --log-disable --log-file --log-jsonl --log-colors --log-prefix --log-timestamps --perf""",
        "--dtype and --kv-cache-dtype set the dtypes": "-ctk --cache-type-k -ctv --cache-type-v",
        "set HF_HUB_OFFLINE": "--offline",
        "OUTRIDER_HEADER_TIMEOUT_S limits how long a request takes to arrive": "-to --timeout --sse-ping-interval",
        "names and prompts are as given": "--tags -e --escape",
        "a conversation that is too long is refused": "--context-shift --no-context-shift",
    }
)
_REFUSED = by_option(
    {
        "adapters are not loaded; merge them into the checkpoint": "--lora --lora-scaled --lora-init-without-apply",
        "no control vectors are added; leave the option out": """--control-vector --control-vector-scaled
            --control-vector-layer-range""",
        "only text generation is served; leave the option out": """--embedding --embeddings --rerank --reranking
            --pooling --embd-normalize""",
        "only text is served; leave the option out": "-mm --mmproj -mmu --mmproj-url --media-path",
        "a KV cache of 8 bits is --kv-cache-dtype int8 or fp8": "-ctk --cache-type-k -ctv --cache-type-v",
        "the model is taken as its file says; leave the option out": """--rope-scale --rope-freq-base --rope-freq-scale
            --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --override-kv""",
        "download the file and give its path, or a Hub id (ORG/NAME:Q4_K_M)": """-mu --model-url -dr --docker-repo -hff
            --hf-file""",
        "set the variable HF_TOKEN": "-hft",
        "send it with each request": """-l --logit-bias --grammar --grammar-file -j --json-schema -jf
            --json-schema-file --ignore-eos --presence-penalty --frequency-penalty --chat-template-kwargs -rea
            --reasoning --reasoning-effort --reasoning-budget --reverse-prompt""",
        "there is no such sampler here; leave the option out": """--samplers --sampler-seq --sampling-seq --top-nsigma
            --top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p --repeat-last-n --dry-multiplier
            --dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --adaptive-target
            --adaptive-decay --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent""",
        "choose one with --reasoning-parser": "--reasoning-format --reasoning-budget-message --reasoning-preserve",
        "choose a method with --speculative-config.method: mtp, eagle3, draft_model, ngram, suffix": """--spec-type
            --spec-default -lcs --lookup-cache-static -lcd --lookup-cache-dynamic""",
        "every acceptance rule here is lossless; leave the option out": "--spec-synth-len --spec-synth-rates",
        "give --api-key, or start the gateway with --api-keys-file": "--api-key-file",
        "start the services one by one and give the gateway --tls-cert-file and --tls-key-file": """--ssl-key-file
            --ssl-cert-file""",
        "put a reverse proxy before the gateway that does it": """--path --api-prefix --reuse-port --cors-origins
            --cors-methods --cors-headers --cors-credentials""",
        "the page is the playground; leave the option out": """--ui-config --webui-config --ui-config-file
            --webui-config-file --ui-mcp-proxy --webui-mcp-proxy --no-ui --no-webui""",
        "tools are run by the client; leave the option out": """--tools --tools-runtime --mcp-servers-config
            --mcp-servers-json -ag --agent -no-ag""",
        "the address is not served; leave the option out": "--props --slots --slot-save-path",
        "one model is served; start a stack for each": "--models-dir --models-preset --models-max --models-autoload",
        "special tokens are in no text; leave the option out": "-sp --special --spm-infill",
        "parsers are chosen with --tool-call-parser none and --reasoning-parser none": "--skip-chat-parsing",
        "prompts are never logged; leave the option out": "--log-prompts-dir",
    }
)
_FLAGS = """
--op-offload --no-host -kvo --kv-offload -nkvo -kvu --kv-unified -no-kvu --swa-full --mlock --mmap --no-mmap --repack
-nr --warmup -fa --flash-attn --backend-sampling -bs --jinja -cb --cont-batching --metrics --cache-prompt
--check-tensors --ui --webui --prefill-assistant --cache-idle-slots --no-mmproj --no-mmproj-auto --mmproj-offload
-cmoe --cpu-moe --spec-draft-cpu-moe -cmoed --cpu-moe-draft --mmproj-auto -nocb --spec-draft-backend-sampling -v
--verbose --log-verbose --log-disable --log-jsonl --log-prefix --log-timestamps --perf --offline -e --escape
--context-shift --no-context-shift -fit --fit
"""
LLAMA = OptionTable(
    "llama-server",
    same={name: ours for ours, names in _SAME.items() for name in names.split()},
    ignored=_IGNORED,
    refused=_REFUSED,
    flags=frozenset(_FLAGS.split()),
    only=dict.fromkeys(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"), "f16|bf16|f32"),
)
