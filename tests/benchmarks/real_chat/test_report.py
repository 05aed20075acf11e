"""The table's ratios, from rows written by hand, and what the picture holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.real_chat import report


def row(
    system: str,
    variant: str,
    rate: float,
    *,
    of_plain: float = 1.0,
    temperature: float = 0.0,
    length: float | None = None,
) -> Any:
    return {
        "system": system,
        "variant": variant,
        "temperature": temperature,
        "num_streams": 4,
        "tokens_per_s": rate,
        "of_plain": of_plain,
        "prompt_tokens": 51.3,
        "ttft_s": {"p50": 0.0254},
        "decode_tokens_per_s": 61.7,
        "acceptance_length": length,
        "same_text_as_plain": "7/8",
    }


ROWS = [
    row("outrider", "off", 100.0),
    row("outrider", "auto", 150.0, of_plain=1.45, length=2.345),
    row("llama.cpp", "off", 40.0),
    row("llama.cpp", "ngram", 60.0, of_plain=1.5),
    row("outrider", "off", 10.0, temperature=1.0),
]


def test_ratios_are_those_of_the_rounds_and_to_the_fastest_peer_at_the_same_load() -> None:
    lines = list(report.table(ROWS))
    assert len(lines) == 2 + len(ROWS)
    assert lines[3] == "| questions | 0 | 4 | outrider | auto | 150.0 | 1.45 | 2.50 | 51 | 25 ms | 62 | 2.35 | 7/8 |"
    assert lines[5] == "| questions | 0 | 4 | llama.cpp | ngram | 60.0 | 1.50 |  | 51 | 25 ms | 62 |  | 7/8 |"
    assert lines[6] == "| questions | 1 | 4 | outrider | off | 10.0 | 1.00 |  | 51 | 25 ms | 62 |  | 7/8 |"


def test_the_picture_names_every_variant_of_the_lowest_temperature(tmp_path: Path) -> None:
    path = tmp_path / "chat.svg"
    report.draw([*ROWS, row("vllm", "off", 30.0, temperature=1.0)], path)
    text = path.read_text()
    assert all(f">{name}<" in text for name in ("outrider, off", "outrider, auto", "llama.cpp, ngram", "tokens/s"))
    assert "vllm" not in text
    before = path.read_bytes()
    report.draw(ROWS, path)
    assert path.read_bytes() == before
