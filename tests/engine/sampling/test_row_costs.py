"""What a row of a request's logits costs beside the row itself: not the request's lists, and not its whole output."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from outrider.engine.sampling.laws import LogitsProcessor
from outrider.engine.sampling.prefixes import common_prefix_len
from outrider.shared.errors import InvalidRequest
from outrider.shared.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS_TOKENS, SamplingParams

VOCAB_SIZE = 64


class Walked(tuple[Any, ...]):
    """Counts how often somebody goes through it."""

    num_walks = 0

    def __iter__(self) -> Iterator[Any]:
        Walked.num_walks += 1
        return super().__iter__()


@pytest.mark.parametrize("field", ["bad_words", "logit_bias", "allowed_token_ids"])
def test_a_requests_lists_are_prepared_once(field: str) -> None:
    """They were gone through for every row: 15 ms of the engine's thread for 1,024 bad words."""
    values = {
        "bad_words": Walked([(1, 2), (3,), (1, 4)]),
        "logit_bias": Walked([(1, 2.0), (3, -1.0)]),
        "allowed_token_ids": Walked(range(40)),
    }
    processor = LogitsProcessor(SamplingParams(**{field: values[field]}), [0], ())
    before = Walked.num_walks
    for output in ([], [1], [1, 2], [1, 3]):
        processor.log_weights(np.zeros(VOCAB_SIZE, dtype=np.float32), output)
    assert Walked.num_walks == before


def test_the_outputs_of_a_request_share_their_bad_words() -> None:
    """Each of 510 outputs took 5 ms of the verifier's event loop to prepare the same 1,024."""
    words = Walked([(11, 2), (13,), (11, 4)])
    first, second = (LogitsProcessor(SamplingParams(bad_words=words, max_tokens=2 + n), [0], ()) for n in range(2))
    assert Walked.num_walks > 0
    before = Walked.num_walks
    third = LogitsProcessor(SamplingParams(bad_words=words), [0], ())
    assert Walked.num_walks == before
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    for processor in (first, second, third):
        assert np.flatnonzero(processor.log_weights(logits, [11]) == -np.inf).tolist() == [2, 4, 13]
        assert np.flatnonzero(processor.log_weights(logits, [12]) == -np.inf).tolist() == [13]


class Read(list[int]):
    """Counts the tokens that are read one by one; slices are compared and copied in C."""

    num_reads = 0

    def __getitem__(self, place: Any) -> Any:
        Read.num_reads += not isinstance(place, slice)
        return super().__getitem__(place)


def test_a_row_reads_no_more_of_the_output_than_a_bad_word_is_long() -> None:
    words = tuple((7,) * length for length in range(1, 100)) + tuple((token, 5) for token in range(60))
    processor = LogitsProcessor(SamplingParams(bad_words=words), [0], ())
    Read.num_reads = 0
    law = processor.log_weights(np.zeros(VOCAB_SIZE, dtype=np.float32), Read([7] * 5000))
    assert sorted(np.flatnonzero(law == -np.inf)) == [5, 7]
    assert Read.num_reads <= 100


def test_one_processor_gives_every_path_the_bits_of_a_new_one() -> None:
    """Drafts go forth and back: what is kept from one row to the next must never show."""
    rng = random.Random(5)
    params = SamplingParams(
        presence_penalty=0.7,
        frequency_penalty=0.3,
        repetition_penalty=1.3,
        bad_words=((1, 2), (1, 1, 3), (2, 1, 1, 3), (9,), (2, 2)),
        logit_bias=((1, 2.5), (4, -0.1)),
    )
    processor = LogitsProcessor(params, [3, 4, 4], ())
    output: list[int] = []
    for _ in range(400):
        cut = rng.randrange(len(output) + 1) if rng.random() < 0.3 else len(output)
        output = output[:cut] + [rng.randrange(5) for _ in range(rng.randrange(4))]
        logits = np.asarray([rng.gauss(0, 3) for _ in range(VOCAB_SIZE)], dtype=np.float32)
        anew = LogitsProcessor(params, [3, 4, 4], ()).log_weights(logits, output)
        assert processor.log_weights(logits, output).tobytes() == anew.tobytes()


def test_common_prefix_len_is_that_of_a_loop() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        left = [rng.randrange(2) for _ in range(rng.randrange(12))]
        right = tuple(left[: rng.randrange(13)]) + tuple(rng.randrange(2) for _ in range(rng.randrange(4)))
        expected = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
        assert common_prefix_len(left, right) == (min(len(left), len(right)) if expected is None else expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (((1,) * (MAX_BAD_WORD_TOKENS + 1),), "a word of 129 tokens, the most is 128"),
        (((1, 2),) * (MAX_BAD_WORDS_TOKENS // 2 + 1), "16386 tokens in all, the most is 16384"),
        (((),), "a word without tokens"),
    ],
    ids=["long", "many", "empty"],
)
def test_bad_words_beyond_the_bounds_are_refused(words: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        SamplingParams(bad_words=words).validate()
    assert refused.value.param == "bad_words"
