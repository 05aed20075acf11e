"""Lines that were written for vLLM, `llama-server` and `vllm bench serve`, as their projects publish them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from docs.generate.cli_page import command_tree
from outrider.client.cli import serve as serve_module
from outrider.client.cli.bench_options import VLLM_BENCH
from outrider.client.cli.foreign_options import Reader, whole_number
from outrider.client.cli.llama_options import LLAMA
from outrider.client.cli.vllm_options import VLLM
from outrider.client.stack.commands import StackSettings, StackState, gateway_command, verifier_command
from outrider.gateway.config import GatewayConfig
from outrider.shared.config import load_config
from outrider.shared.errors import ConfigError
from outrider.verifier_service.config import VerifierConfig

# The distinct `vllm serve` lines of github.com/vllm-project/recipes (August 2026) that have no placeholders.
RECIPES: list[list[str]] = json.loads((Path(__file__).parent / "vllm_recipes.json").read_text())
# Where the table of these lines is.
PAGE = Path(__file__).parents[2] / "docs/coming-from-vllm.md"
# Why lines are refused there -> how a refusal begins -> how many of them there are.
REFUSED = {
    "a parser that is not here": {"--tool-call-parser": 8, "--reasoning-parser": 4},
    "input or output that is not text": {
        "--omni": 23,
        "--limit-mm-per-prompt": 11,
        "--allowed-local-media-path": 3,
        "--mm-processor-kwargs": 1,
        "--video-pruning-rate": 1,
    },
    "weights quantised at load": {"--quantization": 7},
    "another model configuration than the checkpoint's": {"--hf-overrides": 6},
    "another task than generation": {"--runner": 2},
    "code that is loaded by name": {"--logits-processors": 2, "No such option: --tool-call-parser-plugin": 1},
    "a setting that is given elsewhere": {
        "--reasoning-config": 1,
        "--config": 1,
        "--default-chat-template-kwargs": 1,
    },
    "a KV cache of another format than 8 bits": {"--kv-cache-dtype": 1},
}
# Of llama.cpp's tools/server/README.md (commit 00dc8057), all but those that print something or name one model.
LLAMA_SERVER = """
-t --threads -tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb
--cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch -c --ctx-size -n --predict --n-predict -b --batch-size
-ub --ubatch-size --keep --swa-full -fa --flash-attn --perf --no-perf -e --escape --no-escape --rope-scaling
--rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow
--yarn-beta-fast -kvo --kv-offload -nkvo --no-kv-offload --repack -nr --no-repack --no-host -ctk --cache-type-k -ctv
--cache-type-v -dt --defrag-thold --rpc -lm --load-mode -lzm --lazy-mode --numa -dev --device -ot --override-tensor
-cmoe --cpu-moe -ncmoe --n-cpu-moe --moe-cache-mib -ncffn --n-cpu-ffn -ngl --gpu-layers --n-gpu-layers -sm
--split-mode -ts --tensor-split -mg --main-gpu -fit --fit -fitt --fit-target -fitc --fit-ctx --check-tensors
--override-kv --op-offload --no-op-offload --lora --lora-scaled --control-vector --control-vector-scaled
--control-vector-layer-range -m --model -mu --model-url -dr --docker-repo -hf -hfr --hf-repo -hff --hf-file -hft
--hf-token --log-disable --log-file --log-jsonl --no-log-jsonl --log-colors -v --verbose --log-verbose --offline -lv
--verbosity --log-verbosity --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --spec-draft-type-k
-ctkd --cache-type-k-draft --spec-draft-type-v -ctvd --cache-type-v-draft --samplers -s --seed --sampler-seq
--sampling-seq --ignore-eos --temp --temperature --top-k --top-p --min-p --top-nsigma --top-n-sigma --xtc-probability
--xtc-threshold --typical --typical-p --repeat-last-n --repeat-penalty --presence-penalty --frequency-penalty
--dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --adaptive-target
--adaptive-decay --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent -l --logit-bias --grammar
--grammar-file -j --json-schema -jf --json-schema-file -bs --backend-sampling -lcs --lookup-cache-static -lcd
--lookup-cache-dynamic --kv-unified-per-slot -ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step
-cram --cache-ram -kvu --kv-unified -no-kvu --no-kv-unified --cache-idle-slots --no-cache-idle-slots --context-shift
--no-context-shift -r --reverse-prompt -sp --special --warmup --no-warmup --spm-infill --pooling -np --parallel -cb
--cont-batching -nocb --no-cont-batching -mm --mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto
--mmproj-offload --no-mmproj-offload -mmdev --mmproj-device --image-min-tokens --image-max-tokens
--mtmd-batch-max-tokens --video-fps --video-timestamp-interval --video-ffmpeg-dir -a --alias --tags --embd-normalize
--host --port --reuse-port --path --cors-origins --cors-methods --cors-headers --cors-credentials
--no-cors-credentials --api-prefix --ui-config --webui-config --ui-config-file --webui-config-file --ui-mcp-proxy
--webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy --tools --tools-runtime --mcp-servers-config
--mcp-servers-json -ag --agent -no-ag --no-agent --ui --webui --no-ui --no-webui --embedding --embeddings --rerank
--reranking --api-key --api-key-file --ssl-key-file --ssl-cert-file --chat-template-kwargs -to --timeout
--sse-ping-interval --threads-http --cache-prompt --no-cache-prompt --cache-reuse --metrics --props --slots --no-slots
--slot-save-path --media-path --models-dir --models-preset --models-max --models-autoload --no-models-autoload --jinja
--no-jinja --reasoning-format -rea --reasoning --reasoning-effort --reasoning-budget --reasoning-budget-message
--reasoning-preserve --no-reasoning-preserve --chat-template --chat-template-file --skip-chat-parsing
--no-skip-chat-parsing --prefill-assistant --no-prefill-assistant -sps --slot-prompt-similarity
--lora-init-without-apply --sleep-idle-seconds --log-prompts-dir --spec-draft-hf -hfd -hfrd --hf-repo-draft
--spec-draft-threads -td --threads-draft --spec-draft-threads-batch -tbd --threads-batch-draft --spec-draft-cpu-mask
-Cd --cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict --cpu-strict-draft
--spec-draft-prio --prio-draft --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft
--spec-draft-cpu-strict-batch --cpu-strict-batch-draft --spec-draft-prio-batch --prio-batch-draft
--spec-draft-poll-batch --poll-batch-draft --spec-draft-override-tensor -otd --override-tensor-draft
--spec-draft-cpu-moe -cmoed --cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft
--spec-draft-n-max --spec-draft-n-min --spec-synth-len --spec-synth-rates --spec-draft-p-split --draft-p-split
--spec-draft-p-min --draft-p-min --spec-draft-backend-sampling --no-spec-draft-backend-sampling --spec-draft-sampling
--spec-draft-device -devd --device-draft --spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft
--spec-draft-model -md --model-draft --spec-type --spec-ngram-mod-n-min --spec-ngram-mod-n-max
--spec-ngram-mod-n-match --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits
--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n
--spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits --draft --draft-n --draft-max --draft-min --draft-n-min
--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits --spec-default
"""

Started = Callable[[list[str]], StackSettings]


@pytest.fixture(scope="module")
def serve_command() -> Any:
    return command_tree()["serve"]


@pytest.fixture
def started(serve_command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    """What a line of `outrider serve` would start. Raises SystemExit."""
    settings: list[StackSettings] = []
    monkeypatch.setattr(serve_module, "run_in_foreground", lambda given, _run_dir: settings.append(given))

    def start(line: list[str]) -> StackSettings:
        settings.clear()
        try:
            serve_command.main([*line, "--run-dir", str(tmp_path)], prog_name="serve")
        except SystemExit as end:
            if end.code:
                raise
        return settings[0]

    return start


def check_services(settings: StackSettings) -> None:
    """Raises ConfigError: a service does not know a value, such as the name of a parser."""
    commands = verifier_command(settings), gateway_command(settings, StackState(verifiers=["v:1"]))
    for command, kind in zip(commands, (VerifierConfig, GatewayConfig), strict=True):
        load_config(kind, command[command.index("-m") + 2 :], {}, prog="", description="")


def test_the_recipes_of_vllm(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    refused: Counter[str] = Counter()
    speculative: Counter[str] = Counter()
    for line in RECIPES:
        said = _refusal(line, started, capsys)
        refused[said] += 1
        speculative[said] += any(word.startswith(("--spec", "-sc", "--num-spec")) for word in line)
    known = {said: count for reason in REFUSED.values() for said, count in reason.items()}
    assert refused == {**known, "": len(RECIPES) - sum(known.values())}
    rows = [f"| | taken as they are | {refused['']} | {speculative['']} |"]
    for reason, lines in REFUSED.items():
        options = ", ".join(dict.fromkeys(f"`{said.removeprefix('No such option: ').split(':')[0]}`" for said in lines))
        rows.append(f"| {options} | {reason} | {sum(lines.values())} | {sum(speculative[said] for said in lines)} |")
    rows.append(f"| | all | {len(RECIPES)} | {speculative.total()} |")
    table = "\n".join(rows)
    assert table in PAGE.read_text(encoding="utf-8"), f"the table of {PAGE.name} is now\n{table}"


def _refusal(line: list[str], started: Started, capsys: pytest.CaptureFixture[str]) -> str:
    """How the refusal of a line begins; empty: it is taken."""
    try:
        check_services(started(line))
    except ConfigError as error:
        return error.message.partition(": '")[0]
    except SystemExit:
        said = " ".join(capsys.readouterr().err.split())
        return re.sub(r"^.*(outrider|Error): ", "", re.split(" of vLLM|: '|: its| [(]", said)[0])
    return ""


def own_options(command: str) -> dict[str, tuple[str, bool]]:
    return {
        name: (option.opts[0], option.is_flag) for option in command_tree()[command].params[1:] for name in option.opts
    }


def test_every_option_of_llama_server_is_known() -> None:
    own = own_options("serve")
    for name in LLAMA_SERVER.split():
        positive = f"--{name.removeprefix('--no-')}"
        known = {name, positive} & (own.keys() | LLAMA.names | VLLM.names)
        assert known, name


def test_a_line_of_llama_server(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    line = """-m models/demo-target -md models/demo-draft --draft-max 4 -c 256 -np 8 -a mine -ngl 99 -fa on --jinja -t 2
    --temp 0.5 --top-k 20 --host 0.0.0.0 --port 8080 --no-mmap -ctk f16 --no-mmproj --api-key sesame"""
    settings = started(line.split())
    check_services(settings)
    assert (settings.model, settings.draft_model) == ("models/demo-target", "models/demo-draft")
    assert (settings.host, settings.port) == ("0.0.0.0", 8080)
    assert json.loads(settings.override_generation_config) == {"temperature": 0.5, "top_k": 20}
    assert json.loads(settings.speculative_config) == {"num_speculative_tokens": 4}
    given = dict(zip(settings.verifier_args[::2], settings.verifier_args[1::2], strict=True))
    assert given == {"--served-model-name": "mine", "--max-model-len": "256", "--max-num-seqs": "8"}
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("ignored:") == 1
    assert "-fa (kernels are chosen by the device)" in said
    assert "-ngl (the whole model is on OUTRIDER_DEVICE)" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-m x --lora a.gguf", "--lora of llama-server is not taken here: adapters are not loaded; merge them"),
        ("-m x --mmproj p.gguf", "--mmproj of llama-server is not taken here: only text is served"),
        ("-m x -ctk q4_0", "-ctk of llama-server is not taken here: a KV cache of 8 bits is --kv-cache-dtype"),
        ("-m x -n 64", "-n of vLLM is not taken here: it is --nnodes in vLLM and --predict in llama-server"),
    ],
)
def test_what_is_refused(line: str, said: str, started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        started(line.split())
    assert said in " ".join(capsys.readouterr().err.split())


def read(line: str | list[str]) -> tuple[list[str], dict[str, str]]:
    reader = Reader((VLLM, LLAMA), own_options("serve"))
    return reader.read(line.split() if isinstance(line, str) else line), reader.ignored


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("--max_model_len=8k x", "--max-model-len 8k x"),
        ("--trust-remote-code x", "x"),
        ("--no-enable-chunked-prefill x", "x"),
        ("--cudagraph-capture-sizes 1 2 4 --port 1", "--port 1"),
        ("--max-model-len -1 -O3 x", "--max-model-len -1 x"),
        ("-cc.pass_config.fuse_norm true x", "x"),
        ("--tensor-par 2 x", "--tensor-parallel-size 2 x"),
        ("--no-enable-prefix-caching x -- --seed", "--no-enable-prefix-caching x -- --seed"),
        ("--attention_config.use_fp4_indexer_cache True x", "x"),
    ],
)
def test_spellings(line: str, ours: str) -> None:
    own = {**own_options("serve"), "--no-enable-prefix-caching": ("--no-enable-prefix-caching", True)}
    assert Reader((VLLM, LLAMA), own).read(line.split()) == ours.split()


@pytest.mark.parametrize(
    "line",
    [
        ["-sc", '{"method": "mtp", "num_speculative_tokens": 3}'],
        ['--speculative_config={"method": "mtp", "num_speculative_tokens": 3}'],
        ["--speculative-config.method", "mtp", "--speculative-config.num_speculative_tokens", "3"],
        ["--speculative-config.method=mtp", "--speculative-config", '{"num_speculative_tokens": 3}'],
        ["--speculative-config.method", '"mtp"', "--num-speculative-tokens", "3"],
    ],
)
def test_json_in_every_form(line: list[str], started: Started) -> None:
    assert json.loads(started(["org/x", *line]).speculative_config) == {"method": "mtp", "num_speculative_tokens": 3}


def test_keys_beside_a_config_that_is_none() -> None:
    for text in ("[]", "{", "mtp"):
        with pytest.raises(ConfigError, match="--speculative-config is not a JSON object"):
            read(["-sc", text, "--speculative-config.method", "mtp"])


@pytest.mark.parametrize(
    "line",
    [
        "-sc.a 1 -sc.a.b 2",
        "-sc.a.b.c.d",
        "--speculative-config.",
        "-.",
        "--=",
        "--.a=1",
        "--no-",
        "-sc=",
        "-O",
        "--trust-remote-code=x -- --",
        "-sc.a " + "[" * 100_000,
    ],
)
def test_hostile_words_are_read_or_refused(line: str) -> None:
    try:
        words, _ = read(line)
    except ConfigError:
        return
    assert all(isinstance(word, str) for word in words)


@pytest.mark.parametrize(
    ("text", "number"), [("auto", 0), ("-1", 0), ("8k", 8000), ("8K", 8192), ("2.5k", 2500), ("1G", 2**30), ("7", 7)]
)
def test_numbers(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "k", "2.5K", "1e3", "-2", "8kk", "0x10", "9" * 400 + "k", "9" * 5000])
def test_no_numbers(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a whole number, such as 8192"):
        whole_number(text)


def test_a_line_of_vllm_bench_serve() -> None:
    reader = Reader((VLLM_BENCH,), own_options("bench"))
    line = """--backend vllm --model org/x --host 0.0.0.0 --port 8000 --dataset-name random --random-input 800
    --random-output 100 --num-prompt 16 --request-rate 10000 --trust-remote-code --ignore-eos --burstiness 1.0"""
    ours = """--model org/x --host 0.0.0.0 --port 8000 --random-input-len 800 --random-output-len 100 --num-prompts 16
    --request-rate 10000 --ignore-eos"""
    assert reader.read(line.split()) == ours.split()
    assert list(reader.ignored) == ["--backend", "--dataset-name", "--trust-remote-code", "--burstiness"]


@pytest.mark.parametrize("line", ["--backend tgi", "--dataset-name sharegpt", "--goodput ttft:5", "--top-p 0.9"])
def test_what_the_bench_refuses(line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line.split()[0]} of vllm bench serve is not taken here: "):
        Reader((VLLM_BENCH,), own_options("bench")).read(line.split())
