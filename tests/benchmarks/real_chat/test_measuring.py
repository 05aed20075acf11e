"""Which questions a run asks, and one small run of the whole benchmark on a real stack without peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.real_chat import __main__ as real_chat
from benchmarks.real_chat.__main__ import Load
from benchmarks.real_chat.questions import PROMPTS
from benchmarks.real_chat.traffic import Run, Variant
from outrider.client.bench.request import RequestResult

TARGET = Path(__file__).parents[3] / "models" / "demo-target"


def test_rounds_ask_other_questions_and_enough_for_all_streams() -> None:
    assert all(len(set(texts)) == len(texts) for texts in PROMPTS.values())
    assert len(PROMPTS["questions"]) >= 32
    for num_streams, count in ((1, 4), (4, 8), (16, 16), (32, 32)):
        first, second = (Load("questions", 0.0, num_streams).questions(index) for index in range(2))
        assert len(set(first)) == count
        assert num_streams == 32 or not set(first) & set(second)


def test_a_context_is_another_one_for_each_question() -> None:
    plain, long = Load("questions", 0.0, 1).questions(0), Load("questions", 0.0, 1, 2000).questions(0)
    assert [text.split("\n\n")[-1] for text in long] == plain
    assert len({text[:40] for text in long}) == len(long)
    assert all(6000 < len(text) < 8000 for text in long)


def test_runs_do_not_share_a_salt_and_peers_get_no_fields_of_ours() -> None:
    ours = Variant("outrider", "auto", "", "m", {"speculation": {"method": "auto"}}, takes_salt=True)
    assert ours.body("why?", 8, 0.0, "a")["cache_salt"] == "a"
    assert ours.body("why?", 8, 0.0, "a")["speculation"] == {"method": "auto"}
    theirs = Variant("llama.cpp", "off", "", "m", {"cache_prompt": False}).body("why?", 8, 1.0, "a")
    assert theirs["messages"] == [{"role": "user", "content": "why?"}]
    assert not {"cache_salt", "speculation"} & theirs.keys()


def run_of(*texts: str, seconds: float = 1.0) -> Sequence[Run]:
    return [Run(seconds, [RequestResult(num_output_tokens=2, text=text) for text in texts], None)]


def test_other_text_with_drafts_is_an_error_of_ours_and_a_figure_of_a_peer() -> None:
    plain, other = run_of("yes", "no"), run_of("yes", "maybe")
    with pytest.raises(RuntimeError, match="ngram: 1 of 2 answers differ from the plain ones"):
        real_chat._row(Variant("outrider", "ngram", "", "m"), Load("questions", 0.0, 1), other, plain)
    row = real_chat._row(Variant("llama.cpp", "ngram", "", "m"), Load("questions", 0.0, 1), other, plain)
    assert row["same_text_as_plain"] == "1/2"
    assert (
        real_chat._row(Variant("outrider", "ngram", "", "m"), Load("questions", 1.0, 1), other, plain)["tokens_per_s"]
        == 4.0
    )


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """A machine that halves its speed between rounds changes no ratio; the ratio of medians here is 0.75."""
    plain = [*run_of("yes", seconds=1.0), *run_of("yes", seconds=2.0), *run_of("yes", seconds=4.0)]
    drafted = [*run_of("yes", seconds=0.8), *run_of("yes", seconds=8 / 3), *run_of("yes", seconds=3.2)]
    row = real_chat._row(Variant("outrider", "ngram", "", "m"), Load("questions", 0.0, 1), drafted, plain)
    assert row["of_plain"] == pytest.approx(1.25)


@pytest.mark.storm
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "chat.svg"
    real_chat.main(
        str(TARGET), streams="1", temperature=[0.0], prompts=["edits"], max_tokens=8, rounds=1, plot=picture, save=False
    )
    printed = capsys.readouterr().out
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| edits | 0 | 1 | outrider")]
    assert {row[4] for row in rows} == {"off", "suffix", "ngram", "auto"}
    assert all(row[-1] == "4/4 |" for row in rows)
    assert picture.is_file()
