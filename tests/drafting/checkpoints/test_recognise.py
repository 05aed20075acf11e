"""Which kind a folder is; the loaders' tests hold it for every layout that is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.recognise import recognise
from tests.drafting.checkpoints import plain_writer as plain


def test_a_plain_model_is_a_draft_model(target_dir: Path) -> None:
    assert recognise(target_dir) == "draft_model"


@pytest.mark.parametrize("algorithm", ["dflash2", "xpress", "mtp", "eagle"])
def test_algorithms_of_speculators_that_are_not_served_are_named(algorithm: str, tmp_path: Path) -> None:
    config = plain.speculators_config(speculators_model_type=algorithm)
    plain.write(tmp_path, config, plain.eagle3_tensors())
    with pytest.raises(
        CheckpointRefused, match=rf"algorithm {algorithm}, which is not supported. Supported: draft_model"
    ):
        recognise(tmp_path)


@pytest.mark.parametrize(
    ("config", "tensors", "algorithm"),
    [
        ({"architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "dflash_config": {}}, {}, "dflash2"),
        (plain.llama_config(model_type="deepseek_mtp"), {}, "mtp"),
        (plain.modelopt_config(parallel_draft_step=4), {}, "ModelOpt's parallel drafts"),
    ],
)
def test_algorithms_that_are_not_served_are_named_whoever_exported_them(
    config: dict[str, Any], tensors: plain.Tensors, algorithm: str, tmp_path: Path
) -> None:
    plain.write(tmp_path, config, plain.eagle3_tensors() | tensors)
    with pytest.raises(CheckpointRefused, match=f"algorithm {algorithm}.*which is not supported"):
        recognise(tmp_path)


def test_an_unknown_folder_lists_what_was_found_and_what_is_known(tmp_path: Path) -> None:
    plain.write(tmp_path, {"architectures": ["BertModel"], "model_type": "bert"}, {"pooler.weight": plain.numbers(2)})
    known = "draft_model, medusa, eagle, eagle3, mlp_speculator, mtp, dflash, dspark"
    found = "architectures BertModel, model_type 'bert', tensors pooler.weight"
    with pytest.raises(CheckpointRefused, match=rf"{found}. Known: {known}"):
        recognise(tmp_path)


@pytest.mark.parametrize("mark", ["quantization_config", "hf_quant_config.json"])
def test_quantised_drafts_are_refused(mark: str, tmp_path: Path) -> None:
    config = plain.eagle3_config()
    if mark == "quantization_config":
        config[mark] = {"quant_method": "fp8"}
    plain.write(tmp_path, config, plain.eagle3_tensors())
    if mark == "hf_quant_config.json":
        (tmp_path / mark).write_text("{}")
    with pytest.raises(CheckpointRefused, match="quantised"):
        recognise(tmp_path)
