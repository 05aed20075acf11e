"""The demo target on two processes: the same law as on one, and its own bits in every batch.

The other rank is a real process over gloo. Greedy text is compared in fp32, where sums in another order stay far
below the gaps between logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.certificate import certify
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.numerics import measure_numerics
from outrider.engine.run.runner import ModelRunner
from outrider.engine.tensor_parallel.sharding import share
from tests.engine.tensor_parallel.rank_pair import Pair, forward, load_pair

DEMO_TARGET = Path(__file__).parents[3] / "models" / "demo-target"
PROMPTS = ("def fibonacci(n):", "import os\n\n", "class Stack:\n    def push(self, item):")
NUM_NEW_TOKENS = 40


@pytest.fixture(scope="module")
def demo() -> Iterator[Pair]:
    pair = load_pair(DEMO_TARGET, "float32")
    yield pair
    pair.together.close()
    assert pair.failures.empty()


def greedy(loaded: LoadedModel, prompt: list[int]) -> list[int]:
    runner = ModelRunner(loaded, loaded.make_cache(8, 16))
    output: list[int] = []
    rows = prompt
    for _ in range(NUM_NEW_TOKENS):
        context_len = len(prompt) + len(output) - len(rows)
        result = runner.forward(build_batch([SessionRows(rows, context_len, list(range(8)), 1)], 16))
        output.append(int(result.logits[0].argmax()))
        rows = output[-1:]
    return output


def test_shares_cover_everything_once_and_rank_0_has_the_largest() -> None:
    for num_units in range(1, 20):
        for size in range(1, num_units + 1):
            shares = [share(num_units, rank, size) for rank in range(size)]
            assert [unit for start, end in shares for unit in range(start, end)] == list(range(num_units))
            lengths = [end - start for start, end in shares]
            assert lengths == sorted(lengths, reverse=True)
            assert lengths[0] - lengths[-1] <= 1


def test_two_ranks_are_a_kind_of_their_own(demo: Pair) -> None:
    together = {measure_numerics(demo.together, tensor_parallel_size=2) for _ in range(2)}
    assert len(together) == 1
    assert {kind.split("/")[3] for kind in together} == {"tp2"}
    digests = {kind.rpartition("/")[2] for kind in (*together, measure_numerics(demo.alone))}
    assert len(digests) == 2


def test_logits_and_hidden_states_are_those_of_one_process(demo: Pair) -> None:
    token_ids = torch.randint(demo.alone.vocab_size, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    taps = (0, 3, demo.alone.num_layers)
    alone, together = forward(demo.alone, token_ids, taps), forward(demo.together, token_ids, taps)
    torch.testing.assert_close(together.logits, alone.logits, rtol=0, atol=1e-4)
    for layer in taps:
        torch.testing.assert_close(together.hidden[layer], alone.hidden[layer], rtol=1e-4, atol=1e-4)


def test_rank_0_holds_its_share_alone(demo: Pair) -> None:
    """Five KV heads on two ranks: three here."""
    assert [shape.num_kv_heads for shape in demo.alone.layer_shapes] == [5] * 6
    assert [shape.num_kv_heads for shape in demo.together.layer_shapes] == [3] * 6
    assert demo.together.bytes_per_block() * 5 == demo.alone.bytes_per_block() * 3


def test_greedy_text_is_that_of_one_process_and_of_transformers(demo: Pair) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TARGET)
    oracle = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    for prompt in PROMPTS:
        token_ids = tokenizer(prompt)["input_ids"]
        text = greedy(demo.together, token_ids)
        assert text == greedy(demo.alone, token_ids)
        expected = oracle.generate(
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids)),
            max_new_tokens=NUM_NEW_TOKENS,
            eos_token_id=-1,
            pad_token_id=0,
            do_sample=False,
        )
        assert text == expected[0, len(token_ids) :].tolist()


def test_rows_keep_their_bits_in_fp32(demo: Pair) -> None:
    certificate = certify(demo.together, ModelRunner(demo.together, demo.together.make_cache(2, 8)))
    assert certificate.holds, certificate.describe()


def test_cache_moves_reach_every_rank(demo: Pair) -> None:
    """A row written at index 6 and moved to 4 must be read there; on the other rank too, or its heads see zeros."""
    token_ids = list(range(40, 46))
    expected = forward(demo.together, token_ids).logits[-1]
    runner = ModelRunner(demo.together, demo.together.make_cache(8, 16))
    runner.forward(build_batch([SessionRows(token_ids[:4], 0, [0], 0)], 16))
    # Two wrong siblings and the true token hang below index 3: the true one stands at index 6.
    tree = SessionRows([token_ids[3], 7, 8, token_ids[4]], 3, [0], 0, 1, [0, 0, 0])
    runner.forward(build_batch([tree], 16))
    runner.cache.move(torch.tensor([6]), torch.tensor([4]))
    result = runner.forward(build_batch([SessionRows(token_ids[5:], 5, [0], 1)], 16))
    assert torch.equal(result.logits[0], expected)
