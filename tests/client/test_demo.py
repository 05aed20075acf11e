"""What `outrider demo` says of two answers to the same question; the demo itself is run in test_cli.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.client.cli.common import console
from outrider.client.cli.demo import Outcome, Question, Show, present
from outrider.client.generate import StreamedToken, StreamEnd
from outrider.shared.errors import OutriderError

QUESTIONS = (Question("A kind", "Why?"), Question("Another", "When?"))


class Model:
    """Says the same with every method but those in `other`; keeps what it was asked."""

    def __init__(self, other: str = "") -> None:
        self.asked: list[tuple[str, str]] = []
        self._other = other

    def ask(self, _address: str, question: str, method: str) -> Iterator[StreamedToken | StreamEnd]:
        self.asked.append((question, method))
        for text in ("Ä", " word", "?" if method == self._other else "."):
            yield StreamedToken(1, text, "accepted" if method == "auto" else "target")
        yield StreamEnd("stop", 3, 3, 0.0, 0, 0, 0)


def show(model: Model) -> Show:
    return Show("m", "d", ("Warm?",), QUESTIONS, model.ask)


def test_both_are_asked_and_the_target_alone_last() -> None:
    """Or the drafts of lookups could copy the plain answer."""
    model = Model()
    with console.capture() as shown:
        outcomes = present(show(model), "address")
    assert model.asked == [(text, method) for text in ("Warm?", "Why?", "When?") for method in ("auto", "off")]
    assert [outcome.num_bytes for outcome in outcomes] == [8, 8]
    assert "A kind: " in shown.get()


def test_other_bytes_are_an_error() -> None:
    with (
        console.capture(),
        pytest.raises(OutriderError, match="A kind: the answer differs with speculation and without"),
    ):
        present(show(Model("off")), "address")


def test_a_gain_is_said_and_none_is_not() -> None:
    assert Outcome("x", 50.0, 104.0, 7).line() == (
        "x: 104 tokens/s with speculation, 50 without: 2.1 times as fast, same 7 bytes"
    )
    assert "speculation hardly helps here, same 7 bytes" in Outcome("x", 50.0, 54.0, 7).line()
    assert "without: 0.4 times as fast, same 7 bytes" in Outcome("x", 157.0, 65.0, 7).line()
