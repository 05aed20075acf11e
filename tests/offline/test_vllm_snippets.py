"""The offline examples of vLLM's documentation on speculative decoding, with only the import and the paths changed,
and a script with every call and argument that its example program of speculative decoding makes.

https://docs.vllm.ai/en/latest/features/speculative_decoding/: draft model, n-gram, MLP speculator, EAGLE.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.storm

MODELS = Path(__file__).parents[2] / "models"
# Every example begins and ends alike.
HEAD = """
from vllm import LLM, SamplingParams

prompts = ["The future of AI is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
"""
TAIL = """
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""
SNIPPETS = {
    "draft_model": """
llm = LLM(
    model="Qwen/Qwen3-8B",
    tensor_parallel_size=1,
    speculative_config={
        "model": "Qwen/Qwen3-0.6B",
        "num_speculative_tokens": 5,
        "method": "draft_model",
    },
)
""",
    "ngram": """
llm = LLM(
    model="Qwen/Qwen3-8B",
    tensor_parallel_size=1,
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    },
)
""",
    "mlp_speculator": """
llm = LLM(
    model="meta-llama/Meta-Llama-3.1-8B-Instruct",
    tensor_parallel_size=1,
    speculative_config={
        "model": "ibm-ai-platform/llama3-8b-accelerator",
        "draft_tensor_parallel_size": 1,
        "method": "mlp_speculator",
    },
)
""",
    "eagle": """
llm = LLM(
    model="meta-llama/Meta-Llama-3-8B-Instruct",
    tensor_parallel_size=4,
    speculative_config={
        "model": "yuhuili/EAGLE-LLaMA3-Instruct-8B",
        "draft_tensor_parallel_size": 1,
        "num_speculative_tokens": 2,
        "method": "eagle",
    },
)
""",
}
PATHS = {
    "Qwen/Qwen3-8B": "demo-target",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "demo-target",
    "meta-llama/Meta-Llama-3-8B-Instruct": "demo-target",
    "Qwen/Qwen3-0.6B": "demo-draft",
    "ibm-ai-platform/llama3-8b-accelerator": "demo-mlp-speculator",
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": "demo-eagle",
}


# EAGLE's example starts four ranks.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.storm if name == "eagle" else ()) for name in SNIPPETS]
)
def test_the_example_runs_as_it_is_written(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the main module of a script, without a guard: a rank that ran it once more would fail."""
    code = HEAD.replace("from vllm import", "from outrider import") + SNIPPETS[name] + TAIL
    for theirs, ours in PATHS.items():
        code = code.replace(f'"{theirs}"', repr(str(MODELS / ours)))
    script = tmp_path / "example.py"
    script.write_text(code)
    namespace = runpy.run_path(str(script), run_name="__main__")
    assert re.fullmatch(r"Prompt: 'The future of AI is', Generated text: .{2,}\n", capsys.readouterr().out)
    [output] = namespace["outputs"]
    assert output.metrics.speculative_decoding["num_spec_tokens"] > 0
    # The example closes nothing: to drop the LLM has to be enough.
    namespace.clear()
    assert not {"verifier-engine", "drafter-engine", "offline"} & {thread.name for thread in threading.enumerate()}


# What examples/features/speculative_decoding/spec_decode_offline.py calls, in its order and with its arguments.
PROGRAM = """
from argparse import ArgumentParser as FlexibleArgumentParser

from transformers import AutoTokenizer

from outrider import LLM, SamplingParams, TokensPrompt
from outrider.client.bench.dataset import add_dataset_parser, get_samples
from outrider.offline import Counter, Vector

parser = FlexibleArgumentParser()
add_dataset_parser(parser)
for option in ("--model-dir", "--draft", "--method", "--backend"):
    parser.add_argument(option)
args = parser.parse_args()
is_chat = args.enable_multimodal_chat = args.backend == "openai-chat"
tokenizer = AutoTokenizer.from_pretrained(args.model_dir)
samples = get_samples(args, tokenizer)
prompts = [sample.prompt for sample in samples] if is_chat else [
    TokensPrompt(
        prompt_token_ids=tokenizer.encode(sample.prompt, add_special_tokens=False),
        multi_modal_data=sample.multi_modal_data,
    )
    for sample in samples
]
speculative_config = {"method": args.method, "num_speculative_tokens": 3}
if args.method == "ngram":
    speculative_config |= {"prompt_lookup_max": 5, "prompt_lookup_min": 2}
else:
    speculative_config |= {"model": args.draft, "disable_padded_drafter_batch": False, "parallel_drafting": False}
if args.method == "draft_model":
    del speculative_config["disable_padded_drafter_batch"]
    speculative_config |= {"enforce_eager": False, "max_model_len": 256}
llm = LLM(
    model=args.model_dir,
    trust_remote_code=True,
    tensor_parallel_size=1,
    enable_chunked_prefill=False,
    enforce_eager=False,
    gpu_memory_utilization=0.9,
    speculative_config=speculative_config,
    disable_log_stats=False,
    max_model_len=256,
    limit_mm_per_prompt={"image": 5},
    disable_chunked_mm_input=True,
    max_num_seqs=None,
    allowed_local_media_path="",
)
params = SamplingParams(temperature=0, max_tokens=48)
outputs = (llm.chat if is_chat else llm.generate)(prompts, sampling_params=params)
counters = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}
[accepted] = [metric.values for metric in llm.get_metrics() if isinstance(metric, Vector)]
"""
LINES = {
    "ngram": ("--method", "ngram"),
    "draft_model": ("--method", "draft_model", "--draft", "demo-draft"),
    "eagle3": ("--method", "eagle3", "--draft", "demo-eagle3", "--backend", "openai-chat"),
}


@pytest.mark.filterwarnings("ignore:LLM. \\w+ is ignored here", "ignore:speculative_config. \\w+ is ignored here")
@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_the_example_program_counts_its_drafts(
    line: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "".join(f"    value_{number} = values[{number}]\n" for number in range(6))
    data_set = tmp_path / "prompts.jsonl"
    data_set.write_text(json.dumps({"prompt": f"def take(values):\n{lines}"}))
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    given = [str(MODELS / word) if word.startswith("demo-") else word for word in line]
    options = ("--dataset-name", "custom", "--dataset-path", str(data_set), "--num-prompts", "2")
    monkeypatch.setattr(sys, "argv", [str(script), *options, "--model-dir", str(MODELS / "demo-target"), *given])
    found = runpy.run_path(str(script), run_name="__main__")
    figures = [output.metrics.speculative_decoding for output in found["outputs"]]
    counters = found["counters"]
    assert len(figures) == 2
    assert counters["vllm:spec_decode_num_drafts"] == sum(one["num_spec_steps"] for one in figures) > 0
    assert counters["vllm:spec_decode_num_accepted_tokens"] == sum(found["accepted"]) > 0
    assert len(found["accepted"]) <= 3
