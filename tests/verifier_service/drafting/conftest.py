"""A tiny target and its drafters, and the law of the target's first two tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.grid.models import GridModel
from tests.grid.pools import Pools
from tests.verifier_service.drafting.drafting_pair import law_of_two_tokens, save_pair


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> GridModel:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def pools(checkpoints: GridModel) -> Iterator[Pools]:
    opened = Pools(checkpoints, num_threads=1)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def law_of_two(checkpoints: GridModel) -> np.ndarray:
    return law_of_two_tokens(checkpoints.target)
