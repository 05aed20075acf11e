"""However rows come, the drafter ends with each of them once, or with a gap that everybody knows of.

The drafter's side is its own HiddenRows; the verifier's is written down plainly: it has the rows from some index on
and sends those that are asked for, a bounded piece at a time.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import EAGLE, MEDUSA, NGRAM, hidden_rows

from outrider.drafting.hidden_rows import HiddenRows
from outrider.gateway.proposals.hidden_flow import HiddenFlow
from outrider.shared.messages import HiddenStates, HiddenStatesRequest


class Conversation:
    """A verifier that lost what lies before `lost_before`, a flow, and a drafter that checks what it is given."""

    def __init__(self, flow: HiddenFlow, prompt_len: int, committed_len: int, lost_before: int) -> None:
        self.flow = flow
        self.prompt_len = prompt_len
        self.committed_len = committed_len
        self.lost_before = lost_before
        self.rows = HiddenRows()
        # Each index that was handed over, in order.
        self.told: list[int] = []

    def commit(self, num_tokens: int, max_rows: int) -> None:
        """One step; a commit that ends at L brings rows before L - 1."""
        request = self.flow.request(self.committed_len)
        assert request is not None
        self.committed_len += num_tokens
        start = max(request.first_index, self.lost_before)
        end = min(self.committed_len - 1, start + max_rows)
        self.flow.take(hidden_rows(request.layers, start, end) if start < end else None)

    def hand_over(self) -> None:
        for piece in self.flow.hand_over():
            self.told += range(piece.first_index, piece.end)
            self.rows.add(piece, self.prompt_len)

    def check_rows(self) -> None:
        """What the drafter holds at a position is the row of that position."""
        if self.rows.end == self.rows.first:
            return
        indices = torch.arange(self.rows.first, self.rows.end, dtype=torch.float32) - self.prompt_len
        expected = torch.stack([1000.0 * layer + indices for layer in EAGLE.hidden_layers], dim=1)
        assert torch.equal(self.rows.rows(self.rows.first, self.rows.end), expected)


COMMITS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9), st.booleans()), min_size=1, max_size=25)


@settings(max_examples=150, deadline=None)
@given(COMMITS, st.integers(1, 20), st.integers(0, 15), st.integers(-20, 10))
def test_every_row_comes_once_and_in_order(
    commits: list[tuple[int, int, bool]], prompt_len: int, joined_at: int, lost_before: int
) -> None:
    """A drafter that joins at any time, pieces of any size, told after any of them."""
    # The last committed token's own row is never lost: the next forward computes it.
    lost_before = min(max(lost_before, -prompt_len), joined_at - 1)
    talk = Conversation(HiddenFlow(EAGLE, prompt_len), prompt_len, joined_at, lost_before)
    for num_tokens, max_rows, tells in commits:
        talk.commit(num_tokens, max_rows)
        if tells:
            talk.hand_over()
            talk.check_rows()
    while not talk.flow.has_all(talk.committed_len):
        talk.commit(0, 50)
    talk.hand_over()
    talk.check_rows()
    assert talk.told == list(range(talk.lost_before, talk.committed_len - 1)), "each once, none left out"
    if talk.told:
        assert (talk.rows.first, talk.rows.end) == (
            prompt_len + talk.lost_before,
            prompt_len + talk.committed_len - 1,
        )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(0, 3), st.integers(0, 30)), max_size=25),
    st.integers(1, 20),
    st.integers(0, 15),
)
def test_what_a_drafter_has_lost_comes_again(
    commits: list[tuple[int, int, int, int]], prompt_len: int, joined_at: int
) -> None:
    """It says so with any reply, also with one that is late and comes after rows that were not handed over yet."""
    talk = Conversation(HiddenFlow(EAGLE, prompt_len), prompt_len, joined_at, -prompt_len)
    # It has used what lies before; that may be dropped where rows after a gap arrive first.
    needed_from = 0
    for num_tokens, max_rows, action, num_lost in commits:
        talk.commit(num_tokens, max_rows)
        if action in (1, 2):
            talk.hand_over()
            talk.check_rows()
        if action in (2, 3) and talk.rows.end > 0:  # it has lost rows from some index on
            position = max(talk.rows.first, talk.rows.end - num_lost)
            talk.rows.cut_back(position)
            talk.flow.rewind(position - prompt_len)
            needed_from = position
        talk.flow.rewind(None)
    while not talk.flow.has_all(talk.committed_len):
        talk.commit(0, 50)
    talk.hand_over()
    talk.check_rows()
    assert talk.rows.end == prompt_len + talk.committed_len - 1
    assert talk.rows.first <= needed_from


@settings(max_examples=60, deadline=None)
@given(COMMITS, st.integers(1, 20), st.integers(0, 15))
def test_without_history_only_the_newest_rows_are_asked_for(
    commits: list[tuple[int, int, bool]], prompt_len: int, joined_at: int
) -> None:
    """Those after the committed tokens of the step, and nothing of the prompt but its last row."""
    flow = HiddenFlow(MEDUSA, prompt_len)
    committed_len = joined_at
    for num_tokens, _max_rows, tells in commits:
        request = flow.request(committed_len)
        assert request == HiddenStatesRequest(MEDUSA.hidden_layers, committed_len - 1)
        committed_len += num_tokens
        flow.take(hidden_rows(MEDUSA.hidden_layers, request.first_index, committed_len - 1))
        assert flow.has_all(committed_len)
        if tells:
            assert flow.hand_over()[-1].end == committed_len - 1
            assert flow.hand_over() == ()


def test_a_method_without_hidden_states_is_left_in_peace() -> None:
    flow = HiddenFlow(NGRAM, 7)
    assert flow.request(3) is None
    assert flow.has_all(1000)
    flow.take(None)
    assert flow.hand_over() == ()


def test_rows_of_other_layers_are_not_passed_on() -> None:
    """They answer what another drafter's method had asked for."""
    flow = HiddenFlow(EAGLE, 2)
    flow.take(hidden_rows((9,), -2, 5))
    assert flow.hand_over() == ()
    assert not flow.has_all(5)
    assert flow.request(5) == HiddenStatesRequest(EAGLE.hidden_layers, -2)


def test_a_piece_that_begins_late_states_its_gap() -> None:
    flow = HiddenFlow(EAGLE, 4)
    flow.take(hidden_rows(EAGLE.hidden_layers, 1, 3))
    piece: HiddenStates
    (piece,) = flow.hand_over()
    assert (piece.first_index, piece.end) == (1, 3)
    assert flow.has_all(4)
    assert flow.request(4) == HiddenStatesRequest(EAGLE.hidden_layers, 3)
