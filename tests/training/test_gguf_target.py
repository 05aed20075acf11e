"""From a GGUF file to a head that drafts for it: trained by its file's name, without an embedding of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.training.commands.app import app
from tests.engine.model.gguf.gguf_writer import VOCABULARY, write_gguf
from tests.engine.tiny_models import SERVED, save_tiny_model

_PROMPTS = [{"prompt_token_ids": [5, 9, 5, 9, 5, 9, 5]}, {"prompt_token_ids": list(range(20, 60))}]


def test_a_head_for_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, arguments = SERVED["llama"]
    changes = {"vocab_size": len(VOCABULARY), "num_hidden_layers": 6}
    original = save_tiny_model(config, {**arguments, **changes}, tmp_path / "original")
    file = write_gguf(original, tmp_path / "model.gguf", "llama")
    np.save(tmp_path / "data.npy", np.random.default_rng(1).integers(3, len(VOCABULARY), (16, 24)).astype(np.uint16))
    options = [*("--method", "eagle3", "--target", str(file), "--data", str(tmp_path / "data.npy"), "--threads", "1")]
    options += [*("--output", str(tmp_path / "run"), "--steps", "2", "--batch-size", "4", "--no-save-embedding")]
    options += ["--dtype", "float32", "--draft-vocab-size", "60"]
    done = CliRunner().invoke(app, ["train", *options])
    assert done.exit_code == 0, (done.output, done.exception)
    head = tmp_path / "run" / "model"
    assert "embed_tokens.weight" not in load_file(head / "model.safetensors")
    again = ["export", "--run", str(tmp_path / "run"), "--target", str(file), "--output", str(tmp_path / "again")]
    assert CliRunner().invoke(app, [*again, "--dtype", "float32"]).exit_code == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (head / "model.safetensors").read_bytes()

    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    tokens = []
    for drafting in (None, {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}):
        with LLM(model=str(file), num_threads=1, speculative_config=drafting) as llm:
            outputs = llm.generate(_PROMPTS, params)
        tokens.append([output.outputs[0].token_ids for output in outputs])
        assert all((output.metrics.speculative_decoding is not None) == (drafting is not None) for output in outputs)
    assert tokens[0] == tokens[1]
