"""What a learner keeps of served text: bounded, the newest, and a fair sample of what came before."""

from __future__ import annotations

import torch

from outrider.training.learner.windows import Pool, Window, batch_of

WIDTH = 6


def window(number: int, length: int = 4, first_counted: int = 1) -> Window:
    return Window(torch.full((length,), number), first_counted, torch.full((length, WIDTH), float(number)), 2)


SIZE = window(0).num_bytes


def numbers(windows: list[Window]) -> list[int]:
    return [int(each.token_ids[0]) for each in windows]


def test_a_flood_stays_within_the_memory_and_leaves_a_sample_of_all_of_it() -> None:
    pool = Pool(40 * SIZE, seed=3)
    for number in range(4000):
        pool.add(window(number))
        assert sum(each.num_bytes for each in pool.newest(1 << 60) + pool.older(len(pool.newest(1 << 60)))) <= 40 * SIZE
    assert numbers(pool.newest(1 << 60)) == list(range(3999, 3979, -1))
    kept = numbers(pool.older(20))
    assert len(kept) == len(set(kept)) == 20
    assert max(kept) < 3980
    assert 1000 < sum(kept) / 20 < 3000  # uniform over 0 to 3,979: 1,990 with a standard error of 257
    assert pool.num_tokens == 4000 * 3


def test_newest_stops_at_the_tokens_asked_for() -> None:
    pool = Pool(40 * SIZE, seed=0)
    for number in range(10):
        pool.add(window(number))
    assert numbers(pool.newest(7)) == [9, 8, 7]  # three counted tokens each
    assert numbers(pool.older(3)) == [0, 1, 2, 3, 4, 5, 6]
    assert len(pool) == 10


def test_a_window_larger_than_its_share_is_not_kept() -> None:
    pool = Pool(2 * SIZE, seed=0)
    pool.add(window(1, length=9))
    assert len(pool) == 0


def test_windows_of_several_lengths_make_one_batch() -> None:
    batch, view = batch_of([window(1, 5, 2), window(2, 3, 0)], lambda hidden: hidden, 7, num_features=4)
    assert batch.token_ids.tolist() == [[1, 1, 1, 1, 1], [2, 2, 2, 0, 0]]
    assert batch.counts.tolist() == [[False, False, True, True, True], [True, True, True, False, False]]
    assert view.features.shape == (2, 5, 4)
    assert view.final.shape == (2, 5, 2)
    assert view.final[1, 3:].abs().sum() == 0
