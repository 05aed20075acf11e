"""The offline examples of vLLM's documentation on speculative decoding, with only the import and the paths changed.

https://docs.vllm.ai/en/latest/features/speculative_decoding/: draft model, n-gram, MLP speculator, EAGLE.
"""

from __future__ import annotations

import re
import runpy
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
