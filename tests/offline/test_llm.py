"""LLM on the demo models: the bytes of the target alone, whoever drafts, and everything that comes with a text.

Oracles: a VerifierEngine without drafts, driven session by session, and transformers' greedy `generate`, in float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.offline import LLM, GenerationFailed, RequestOutput, SamplingParams, StructuredOutputsParams
from outrider.offline.engines import Engines, start_engines
from outrider.shared import sampling_params as engine_params
from outrider.shared.errors import ConfigError, InvalidRequest
from outrider.shared.sampling_params import stream_key
from outrider.verifier_service.config import VerifierConfig
from tests.verifier_service.engine_client import generate, make_spec, tokens_of

MODELS = Path(__file__).parents[2] / "models"
TARGET = MODELS / "demo-target"
PROMPTS = [
    "def fibonacci(n):",
    "import os\nimport sys\n",
    "class Stack:\n    def push(self, item):\n        ",
    "for i in",
]
NUM_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=7)
DRAFTS: dict[str, dict[str, Any]] = {
    "draft_model": {"model": MODELS / "demo-draft", "method": "draft_model", "num_speculative_tokens": 4},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    "eagle": {"model": MODELS / "demo-eagle", "method": "eagle", "num_speculative_tokens": 3},
}


def make_llm(**arguments: Any) -> LLM:
    return LLM(TARGET, **{"dtype": "float32", "num_threads": 1, "kv_cache_mb": 64, **arguments})


@pytest.fixture(scope="module")
def alone() -> Iterator[Engines]:
    """The target without anything that drafts, and without LLM."""
    engines = start_engines(VerifierConfig(model=str(TARGET), dtype="float32", num_threads=1, kv_cache_mb=64))
    yield engines
    engines.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm(speculative_config=DRAFTS["draft_model"], max_num_seqs=3) as made:
        yield made


@pytest.fixture(scope="module")
def prompt_ids() -> list[list[int]]:
    return AutoTokenizer.from_pretrained(TARGET)(PROMPTS)["input_ids"]


def ids_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def truth(alone: Engines, prompt_ids: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    asked = engine_params.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        seed=params.seed,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
    )
    found = []
    for prompt in prompt_ids:
        spec = make_spec(prompt, asked, stream_key=stream_key(params.seed or 0, prompt, 0))
        found.append(list(tokens_of(generate(alone.verifier, spec, free_run=NUM_TOKENS))))
    return found


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_tokens_are_those_of_the_target_alone(draft: str, alone: Engines, prompt_ids: list[list[int]]) -> None:
    with make_llm(speculative_config=DRAFTS[draft]) as drafted:
        for params in (GREEDY, SEEDED):
            outputs = drafted.generate(PROMPTS, params)
            assert ids_of(outputs) == truth(alone, prompt_ids, params)
            figures = [output.metrics.speculative_decoding for output in outputs]
            assert sum(shown["num_accepted_draft_tokens"] for shown in figures if shown is not None) > 0
        trees = replace(SEEDED, extra_args={"speculation": {"token_tree": True}})
        assert ids_of(drafted.generate(PROMPTS, trees)) == truth(alone, prompt_ids, SEEDED)


def test_greedy_is_that_of_transformers(llm: LLM, prompt_ids: list[list[int]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    settings = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    expected = []
    for ids in prompt_ids:
        generated = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **settings)
        expected.append(generated[0, len(ids) :].tolist())
    assert ids_of(llm.generate(PROMPTS, GREEDY)) == expected


def test_an_output_tells_what_vllms_tells(llm: LLM, prompt_ids: list[list[int]]) -> None:
    first, second = llm.generate(PROMPTS[:2], GREEDY)
    assert (first.prompt, first.prompt_token_ids) == (PROMPTS[0], prompt_ids[0])
    assert int(second.request_id) == int(first.request_id) + 1
    [choice] = first.outputs
    assert choice.text == AutoTokenizer.from_pretrained(TARGET).decode(choice.token_ids)
    assert (choice.index, choice.finish_reason, choice.stop_reason) == (0, "length", None)
    assert choice.logprobs is choice.cumulative_logprob is first.prompt_logprobs is None
    figures = first.metrics.speculative_decoding
    assert figures is not None
    assert figures["num_spec_tokens"] == 4
    # Every committed token but the first is of a round: accepted, and one more.
    assert figures["num_accepted_draft_tokens"] + figures["num_spec_steps"] <= NUM_TOKENS
    assert 0.0 < first.metrics.first_token_s <= first.metrics.total_s


def test_speculation_can_be_turned_off_for_a_request(llm: LLM) -> None:
    plain = replace(SEEDED, extra_args={"speculation": {"method": "off"}})
    drafted, alone = llm.generate([PROMPTS[0], PROMPTS[0]], [SEEDED, plain])
    assert drafted.outputs[0].token_ids == alone.outputs[0].token_ids
    assert alone.metrics.speculative_decoding is None


def test_prompts_of_every_form_give_the_same(llm: LLM, prompt_ids: list[list[int]]) -> None:
    [expected] = ids_of(llm.generate(PROMPTS[0], GREEDY))
    outputs = llm.generate([{"prompt": PROMPTS[0]}, {"prompt_token_ids": prompt_ids[0]}, prompt_ids[0]], GREEDY)
    assert ids_of(outputs) == [expected] * 3
    assert [output.prompt for output in outputs] == [PROMPTS[0], None, None]


def test_several_choices_differ_and_the_first_is_that_of_one(llm: LLM) -> None:
    [one], [two] = (llm.generate(PROMPTS[0], replace(SEEDED, n=n)) for n in (1, 2))
    assert [choice.index for choice in two.outputs] == [0, 1]
    assert two.outputs[0] == one.outputs[0]
    assert two.outputs[1].token_ids != one.outputs[0].token_ids


def test_more_choices_than_sessions_wait_their_turn(llm: LLM) -> None:
    """The engines themselves would refuse a seventh session."""
    outputs = llm.generate(PROMPTS, replace(SEEDED, n=8, max_tokens=12))
    assert [len(choice.token_ids) for output in outputs for choice in output.outputs] == [12] * 32


async def test_it_works_where_an_event_loop_is_running(llm: LLM) -> None:
    """As in a notebook."""
    [output] = llm.generate(PROMPTS[0], GREEDY)
    assert len(output.outputs[0].token_ids) == NUM_TOKENS


def test_a_stop_string_and_a_stop_token_end_the_output(llm: LLM) -> None:
    [free] = llm.generate(PROMPTS[1], GREEDY)
    text, token_ids = free.outputs[0].text, free.outputs[0].token_ids
    [by_text] = llm.generate(PROMPTS[1], replace(GREEDY, stop=text[10:14]))
    assert by_text.outputs[0].text == text[: text.index(text[10:14])]
    assert (by_text.outputs[0].finish_reason, by_text.outputs[0].stop_reason) == ("stop", text[10:14])
    [by_token] = llm.generate(PROMPTS[1], replace(GREEDY, stop_token_ids=[token_ids[5]]))
    assert by_token.outputs[0].token_ids == token_ids[: token_ids.index(token_ids[5]) + 1]
    assert by_token.outputs[0].stop_reason == token_ids[5]


def test_log_probabilities_of_prompt_and_output(llm: LLM, prompt_ids: list[list[int]]) -> None:
    [output] = llm.generate(PROMPTS[0], replace(GREEDY, logprobs=2, prompt_logprobs=1))
    [choice] = output.outputs
    assert choice.logprobs is not None
    assert output.prompt_logprobs is not None
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt_ids[0] + choice.token_ids])).logits[0]
    laws = torch.log_softmax(logits.double(), -1)
    expected = laws[:-1].gather(1, torch.tensor(prompt_ids[0] + choice.token_ids)[1:, None])[:, 0].tolist()
    rows = [*output.prompt_logprobs[1:], *choice.logprobs]
    ids = [*prompt_ids[0][1:], *choice.token_ids]
    found = [row[token_id].logprob for row, token_id in zip(rows, ids, strict=True) if row is not None]
    assert output.prompt_logprobs[0] is None
    assert found == pytest.approx(expected, abs=1e-4)
    assert all(
        len(row) == 2 and row[token_id].rank == 1
        for row, token_id in zip(choice.logprobs, choice.token_ids, strict=True)
    )
    assert choice.cumulative_logprob == pytest.approx(math.fsum(expected[len(prompt_ids[0]) - 1 :]), abs=1e-3)


def test_an_output_obeys_its_regular_expression(llm: LLM) -> None:
    pattern = r"[a-z]{3}-[0-9]{4}"
    params = SamplingParams(seed=3, max_tokens=30, structured_outputs=StructuredOutputsParams(regex=pattern))
    [output] = llm.generate("id = ", params)
    assert re.fullmatch(pattern, output.outputs[0].text)


def test_a_chat_is_written_by_the_checkpoints_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    prompt = "<|user|>\nhello<|end|>\n<|assistant|>\n"
    [chatted] = llm.chat(messages, GREEDY)
    assert chatted.prompt == prompt
    assert ids_of(llm.chat([messages, messages], GREEDY)) == [chatted.outputs[0].token_ids] * 2
    [written] = llm.generate(prompt, GREEDY)
    assert written.prompt_token_ids == chatted.prompt_token_ids


def test_a_failed_request_costs_nobody_elses_output(llm: LLM) -> None:
    """Three at a time, so that some have ended, run and wait when one fails."""
    prompts = [PROMPTS[0], "x " * 4000, *PROMPTS[1:], {"prompt_token_ids": [5000]}]
    with pytest.raises(GenerationFailed) as failed:
        llm.generate(prompts, GREEDY)
    error = failed.value
    assert sorted(error.failures) == [1, 5]
    assert all(isinstance(failure, InvalidRequest) for failure in error.failures.values())
    assert error.message.startswith("2 of 6 requests failed, first prompt 1 (request ")
    assert [output is None for output in error.outputs] == [False, True, False, False, False, True]
    assert ids_of([output for output in error.outputs if output]) == ids_of(llm.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(temperature=-1.0), "temperature"),
        (SamplingParams(logprobs=1000), "logprobs"),
        (SamplingParams(extra_args={"lora": 1}), None),
        (SamplingParams(structured_outputs={"regex": "(", "choice": ["a"]}), "structured_outputs"),
    ],
)
def test_a_wrong_sampling_parameter_is_named(llm: LLM, params: SamplingParams, param: str | None) -> None:
    with pytest.raises(GenerationFailed) as failed:
        llm.generate("x", params)
    assert failed.value.param == param


def test_as_many_sampling_params_as_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="2 prompts, but 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY])


def test_no_max_tokens_fills_the_context_and_the_seed_repeats_a_program() -> None:
    outputs = []
    for _ in range(2):
        with make_llm(max_model_len=60, seed=5) as short:
            outputs.append(short.generate([PROMPTS[0]] * 2, SamplingParams(max_tokens=None, ignore_eos=True)))
    first, second = outputs
    assert all(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 60 for output in first)
    assert ids_of(first) == ids_of(second)
    assert ids_of(first)[0] != ids_of(first)[1]
    with pytest.raises(ConfigError, match="is closed"):
        short.generate("x")


def test_without_sampling_params_those_of_the_checkpoint_hold(tmp_path: Path) -> None:
    for file in TARGET.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 9, "eos_token_id": [0, 4]}')
    with LLM(tmp_path, dtype="float32", num_threads=1, kv_cache_mb=64) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=9)
        assert llm.get_default_sampling_params() == greedy
        assert ids_of(llm.generate(PROMPTS)) == ids_of(llm.generate(PROMPTS, greedy))


def test_progress_is_told_on_stderr_when_asked_for(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS[:2], GREEDY)
    assert capfd.readouterr() == ("", "")  # no terminal here
    llm.generate(PROMPTS[:2], GREEDY, use_tqdm=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert re.search(r"2/2 \d+ tokens/s, \d+% accepted", shown.err)
