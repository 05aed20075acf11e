"""One torch thread for the engine's tests.

Their models are tiny: a second thread gains nothing, and on a busy machine each OpenMP barrier then waits for
a core (measured: the architecture tests take 71 s instead of 16 beside a training run). Tests that are about
threads set their own number.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
