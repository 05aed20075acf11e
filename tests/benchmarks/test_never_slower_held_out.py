"""The cells of never_slower_held_out without a stack: schedules of arrivals, turns, scores, pinning, prompts."""

from __future__ import annotations

import asyncio
import random
from itertools import groupby, pairwise

import pytest
import typer

from benchmarks import load
from benchmarks.load import LoadResult, RequestTimes, Shape, arrival_times, run_open_loop, run_requests
from benchmarks.never_slower_held_out import CELLS, CellScore, chosen, score_of, summary
from benchmarks.prompts import unrepeated_prompts
from benchmarks.stack_cells.stacks import STACKS
from benchmarks.stack_cells.traffic import code_then_unrepeated, greedy_and_sampled, open_loop_score, salt_for
from benchmarks.turns import CONTROL, Draft, Measured, best_fixed, ratio, shape_for, take_turns, variants

ADDRESSES = ["127.0.0.1:7001", "127.0.0.1:7002"]


def test_arrivals_are_a_poisson_process_of_the_wanted_rate() -> None:
    arrivals_s = arrival_times(4001, 5.0, random.Random(0))
    gaps_s = [after - before for before, after in pairwise(arrivals_s)]
    assert arrivals_s[0] == 0.0 < min(gaps_s)
    assert sum(gaps_s) / 4000 == pytest.approx(0.2, rel=0.05)
    # Exponential gaps: standard deviation and mean are equal, and exp(-1) of the gaps are longer than the mean.
    assert sum(gap_s**2 for gap_s in gaps_s) / 4000 == pytest.approx(2 * 0.2**2, rel=0.1)
    assert sum(gap_s > 0.2 for gap_s in gaps_s) / 4000 == pytest.approx(0.368, abs=0.03)


def test_equal_random_states_give_equal_arrivals() -> None:
    assert arrival_times(9, 2.0, random.Random(3)) == arrival_times(9, 2.0, random.Random(3))
    assert arrival_times(9, 2.0, random.Random(3)) != arrival_times(9, 2.0, random.Random(4))
    assert arrival_times(1, 2.0, random.Random(0)) == [0.0]
    assert arrival_times(0, 2.0, random.Random(0)) == []


@pytest.mark.parametrize("is_open", [True, False])
async def test_only_an_open_loop_sends_before_earlier_requests_are_answered(
    monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    all_sent, sent = asyncio.Event(), []

    async def stream(_client: object, prompt: str, _shape: Shape) -> RequestTimes:
        sent.append(prompt)
        if len(sent) == 3:
            all_sent.set()
        if is_open:
            await all_sent.wait()
        return RequestTimes(token_ids=[len(prompt)])

    monkeypatch.setattr(load, "_stream", stream)
    prompts, shape = ["a", "bb", "ccc"], Shape(1)
    if is_open:
        result = await run_open_loop("http://nowhere", prompts, shape, 200.0, random.Random(0))
    else:
        result = await run_requests("http://nowhere", [(prompt, shape) for prompt in prompts], 1)
    assert sent == prompts
    assert [request.token_ids for request in result.requests] == [[1], [2], [3]]


def test_an_open_loop_scores_the_mean_request_not_the_mean_token() -> None:
    """0.1 and 0.3 s a token; tokens/s is 22 / 3."""
    quick = RequestTimes(num_tokens=2, first_token_s=0.15, pieces_s=[0.05])
    slow = RequestTimes(num_tokens=20, first_token_s=2.0, pieces_s=[3.0, 1.0])
    assert quick.latency_per_token_s == pytest.approx(0.1)
    assert open_loop_score(LoadResult(3.0, [quick, slow])) == pytest.approx(1 / 0.2)


def test_turns_go_back_and_forth() -> None:
    seen: list[tuple[str, int]] = []

    def run(name: str, round_index: int) -> Measured:
        seen.append((name, round_index))
        return Measured(float(len(seen)), [[1, 2]])

    assert take_turns(["off", "auto"], 3, run) == {"off": [1.0, 4.0, 5.0], "auto": [2.0, 3.0, 6.0]}
    assert seen == [("off", 0), ("auto", 0), ("auto", 1), ("off", 1), ("off", 2), ("auto", 2)]


@pytest.mark.parametrize("different", [("auto", 0), ("off", 1)])
def test_different_tokens_end_the_measurement(different: tuple[str, int]) -> None:
    def run(name: str, round_index: int) -> Measured:
        return Measured(1.0, [[1, 3 if (name, round_index) == different else 2]])

    with pytest.raises(RuntimeError, match=f"different tokens: '{different[0]}' in round {different[1]}"):
        take_turns(["off", "auto"], 2, run)


def test_ratios_are_of_one_round() -> None:
    """The machine became twice as fast between the rounds: the medians alone would say 1.0."""
    assert ratio([90.0, 180.0, 200.0], [100.0, 200.0, 180.0]) == pytest.approx(0.9)


def test_a_cell_is_scored_against_off_and_the_best_fixed_length() -> None:
    scores = {"off": [100.0, 90.0], "auto": [97.0, 90.0], CONTROL: [102.0, 99.0], "1 tokens": [80.0, 120.0]}
    assert best_fixed(scores) == "1 tokens"
    found = score_of(scores)
    assert (found.auto_of_off, found.control_of_off) == pytest.approx((0.985, 1.06))
    assert found.auto_of_best == pytest.approx((97 / 80 + 90 / 120) / 2)
    assert best_fixed({"off": [2.0], "auto": [4.0], CONTROL: [3.0], "5 tokens": [1.0]}) == "off"


def test_the_summary_counts_kept_promises_and_shows_the_noise() -> None:
    text = summary([CellScore(0.97, 0.96, "off", 0.97), CellScore(1.5, 1.02, "3 tokens", 0.91)])
    assert "auto / off: at least 0.97 in 2 of 2 cells (100%), worst 0.970" in text
    assert "auto / best fixed: mean 0.940, worst 0.910" in text
    assert "off again / off: at least 0.97 in 1 of 2 cells, from 0.960 to 1.020" in text
    assert "in 0 of 1 cells (0%)" in summary([CellScore(0.969, 1.0, "off", 0.97)])


def test_a_salt_pins_a_prompt_to_either_verifier() -> None:
    for prompt in ([1, 2, 3], [4] * 300):
        salts = [salt_for(prompt, address, ADDRESSES) for address in ADDRESSES]
        assert len(set(salts)) == 2
        assert all(1 <= len(salt) <= 2 for salt in salts)


def test_variants_are_asked_for_the_same_tokens() -> None:
    drafts = variants("ngram", (1, 5))
    assert list(drafts) == ["off", "auto", CONTROL, "1 tokens", "5 tokens"]
    assert drafts["off"] == drafts[CONTROL]
    assert drafts["5 tokens"] == Draft("ngram", 5)
    shapes = [shape_for(draft, 8, 1.0) for draft in drafts.values()]
    assert {(shape.temperature, shape.seed, shape.mode) for shape in shapes} == {(1.0, 7, "exact")}
    greedy = shape_for(drafts["auto"], 8, cache_salt="3")
    assert (greedy.temperature, greedy.seed, greedy.mode, greedy.cache_salt) == (0.0, None, None, "3")


def test_nothing_repeats_in_a_prompt_without_repetition() -> None:
    prompts = unrepeated_prompts(6)
    assert len(set(prompts)) == 6
    for prompt in prompts:
        assert len(prompt.split()) == len(set(prompt.split())) == 80
    assert prompts[:3] == unrepeated_prompts(3)


def test_requests_of_two_temperatures() -> None:
    assert greedy_and_sampled(["a", "b", "c"]) == (("a", 0.0), ("b", 1.0), ("c", 0.0))
    turning = code_then_unrepeated(2)
    assert [temperature for _, temperature in turning] == [0.0, 0.0, 1.0, 1.0]
    assert [prompt for prompt, _ in turning[2:]] == unrepeated_prompts(2)


def test_cells_are_chosen_by_name_in_their_own_order() -> None:
    assert [cell.name for cell in chosen("turns-bad,ngram-16x4")] == ["ngram-16x4", "turns-bad"]
    assert {cell.name for cell in chosen("all")} == set(CELLS)
    left_out = set(CELLS) - {cell.name for cell in chosen("")}
    assert left_out == {*(f"{drafter}-64x{streams}" for drafter in ("ngram", "draft_model") for streams in (4, 16))} | {
        "draft_model-400x16"
    }
    with pytest.raises(typer.BadParameter, match="no cell typo"):
        chosen("typo,turns-bad")


def test_every_stack_is_started_once() -> None:
    stacks = [stack for stack, _ in groupby(CELLS.values(), key=lambda cell: cell.stack)]
    assert sorted(stacks) == sorted(STACKS)
