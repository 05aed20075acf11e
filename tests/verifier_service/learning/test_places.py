"""Which salts have a place: few, not to be had cheaply, and free for others once their tenant has gone."""

from __future__ import annotations

import pytest

from outrider.shared.errors import InvalidRequest
from outrider.verifier_service.learning import places as places_file
from outrider.verifier_service.learning.places import NO_PLACE, SaltPlaces, num_places_in

CYCLE_TOKENS = 1000


class Places(SaltPlaces):
    def __init__(self, num_places: int) -> None:
        super().__init__(num_places, CYCLE_TOKENS)
        self.lost: list[tuple[int, str]] = []
        self.on_lost = lambda number, salt: self.lost.append((number, salt))


def test_each_salt_has_a_place_of_its_own_while_there_are_some() -> None:
    places = Places(2)
    assert [places.serve(salt, 20) for salt in ("a", "b", "a", "c", "b")] == [1, 2, 1, NO_PLACE, 2]
    assert len(places) == 2
    assert [number in places for number in (NO_PLACE, 1, 2, 3)] == [False, True, True, False]
    assert [places.salt_of(number) for number in (1, 2)] == ["a", "b"]
    assert not places.lost


def test_a_place_is_lost_to_a_salt_that_served_a_cycle_more() -> None:
    places = Places(2)
    places.serve("busy", 5000)
    places.serve("quiet", 300)
    assert [places.serve("new", 1000) for _ in range(2)] == [NO_PLACE, 3]
    assert places.lost == [(2, "quiet")]
    assert 2 not in places
    with pytest.raises(InvalidRequest, match="has lost its place"):
        places.salt_of(2)
    assert places.serve("quiet", 20) == NO_PLACE  # what it served before counts, but is not enough
    assert places.serve("busy", 20) == 1


def test_many_salts_of_a_request_each_take_no_place() -> None:
    places = Places(2)
    places.serve("a", 100)
    places.serve("b", 100)
    assert {places.serve(f"salt-{number}", 50) for number in range(3000)} == {NO_PLACE}
    assert not places.lost
    assert len(places._tokens) <= places_file._MOST_COUNTED


def test_a_tenant_who_has_gone_gives_way() -> None:
    places = Places(2)
    places.serve("gone", 15_000)
    found = []
    for _ in range(2000):
        places.serve("busy", 100)
        found.append(places.serve("new", 50))
    assert found[0] == NO_PLACE
    assert found[-1] == 3
    assert places.lost == [(1, "gone")]


def test_two_that_serve_alike_do_not_take_turns_in_a_place() -> None:
    places = Places(1)
    for _ in range(2000):
        places.serve("first", 50)
        assert places.serve("second", 50) == NO_PLACE
    assert not places.lost


@pytest.mark.parametrize(
    ("buffer_mb", "row_bytes", "expected"),
    [(512, 2560, 4), (512, 32_768, 1), (16, 32_768, 1), (8192, 2560, 8), (700, 2560, 6)],
)
def test_memory_says_for_how_many_salts_there_is_text(buffer_mb: int, row_bytes: int, expected: int) -> None:
    num_places = num_places_in(buffer_mb << 20, row_bytes, 20_000)
    assert num_places == expected
    tokens = (buffer_mb << 20) / num_places / row_bytes
    assert num_places == 1 or tokens * 0.45 >= 20_000
