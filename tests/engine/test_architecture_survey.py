"""The table behind docs/architectures.md is that of the installed transformers, and is what loading says."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from docs.generate.architectures_page import PAGE, TABLE, Row, architectures_page, read_survey
from outrider.engine.errors import ModelRefused
from outrider.engine.model.load import load_model
from outrider.engine.model.text_part import WRAPPERS
from tests.engine.architecture_survey import model_types, survey_one, table_text
from tests.engine.tiny_models import HYBRIDS, REFUSED, SERVED, save_tiny_model

ROWS: dict[str, Row] = {row["model_type"]: row for row in read_survey()["rows"]}
# One of each outcome, and of each check that refuses.
SOME = (
    "llama",
    "minimax_m2",
    "jetmoe",
    "bloom",
    "mamba",
    "xglm",
    "bart",
    "diffllama",
    "zaya",
    "dbrx",
    "qwen3_5_text",
    "llama4_text",
)


def test_the_page_is_written_from_the_table() -> None:
    assert TABLE.read_text(encoding="utf-8") == table_text(read_survey())
    assert PAGE.read_text(encoding="utf-8") == architectures_page(read_survey())


def test_the_table_is_of_the_installed_transformers() -> None:
    """After a bump: python -m tests.engine.architecture_survey."""
    assert read_survey()["transformers"] == transformers.__version__
    assert list(ROWS) == model_types()
    assert read_survey()["multimodal"] == sorted(WRAPPERS)


@pytest.mark.parametrize("model_type", SOME)
def test_the_table_is_what_loading_says(model_type: str) -> None:
    assert survey_one(model_type) == ROWS[model_type]


@pytest.mark.storm
@pytest.mark.timeout(1800)
def test_the_whole_table_is_what_loading_says() -> None:
    assert [survey_one(model_type) for model_type in ROWS] == list(ROWS.values())


@pytest.mark.parametrize("name", sorted(SERVED | HYBRIDS))
def test_what_the_other_tests_serve_is_listed_as_served(name: str) -> None:
    config_name, arguments = (SERVED | HYBRIDS)[name]
    assert ROWS[getattr(transformers, config_name)(**arguments).model_type]["outcome"] == "exact"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refusal_names_the_page_and_is_on_it(name: str, tmp_path: Path) -> None:
    save_tiny_model(*REFUSED[name], tmp_path)
    with pytest.raises(ModelRefused) as refused:
        load_model(str(tmp_path))
    assert f"docs/{PAGE.name}" in str(refused.value)
    row = ROWS[getattr(transformers, REFUSED[name][0]).model_type]
    assert (row["outcome"], row["reason"]) == ("refused", refused.value.cause)
