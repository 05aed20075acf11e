"""Sessions that take the blocks of one that runs alone, between two of its rounds."""

from __future__ import annotations

from outrider.shared.messages import SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from tests.grid.driver import Driver, Session
from tests.grid.pools import BLOCK_SIZE, SOLO_BLOCKS, Pool

# It leaves this many blocks of a solo pool: fewer than the cell's prompt and first tokens take.
_BLOCKS_LEFT = 6
_EVERY = 48


class Intruder:
    """`take_blocks` is a Driver's interlude."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._last_visit = 0
        self._num_visits = 0

    def take_blocks(self, committed_len: int) -> None:
        """Fills the pool but for a few blocks while the cell's session is idle: that one has to give its own."""
        if committed_len - self._last_visit < _EVERY:
            return
        self._last_visit = committed_len
        self._num_visits += 1
        prompt = range(self._num_visits, self._num_visits + BLOCK_SIZE * (SOLO_BLOCKS - _BLOCKS_LEFT))
        spec = SessionSpec(
            session_id=f"intruder-{self._num_visits}",
            epoch=0,
            prompt_token_ids=tuple(prompt),
            committed_token_ids=(),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
            mode=SpeculationMode.EXACT,
            stream_key=0,
            cache_salt=f"intruder-{self._num_visits}",
        )
        Driver(self._pool).run([Session(spec, None, 0, free_run=1)])
