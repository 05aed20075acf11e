"""What a verifier records of its sessions: the target's own rows, of sessions that may be learned from, bounded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from outrider.drafting.recorded_states import RecordedStates
from outrider.engine.certificate import Certificate
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.model.weights_digest import weights_digest
from outrider.shared.errors import ConfigError
from outrider.shared.messages import SessionSpec
from outrider.shared.request_params import Speculation
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.learning.recorder import StatesRecorder, build_recorder
from tests.verifier_service.engine_client import PROMPT, generate, make_spec, prompt_of, running_engine, tokens_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LAYERS = (1, 2)  # the second is the final norm's output: the model has two layers
LOG = logging.getLogger("test")


@pytest.fixture
def engine(loaded: LoadedModel, certificate: Certificate) -> Iterator[VerifierEngine]:
    with running_engine(loaded, certificate) as engine:
        yield engine


def recorder_of(engine: VerifierEngine, folder: Path, max_bytes: int = 1 << 20) -> StatesRecorder:
    recorder = StatesRecorder(folder, LAYERS, "digest", max_bytes, engine.rounds.read_rows, LOG)
    engine.when_sessions_end(recorder.take, LAYERS)
    recorder.start()
    return recorder


def serve(engine: VerifierEngine, specs: Sequence[SessionSpec]) -> None:
    for spec in specs:
        generate(engine, spec, free_run=64)
    engine.between_rounds(lambda: None)  # sessions are closed by commands before this one


def test_a_session_is_recorded_with_transformers_rows(engine: VerifierEngine, checkpoint: Path, tmp_path: Path) -> None:
    recorder = recorder_of(engine, tmp_path)
    answer = tokens_of(generate(engine, make_spec(PROMPT, GREEDY), free_run=64))
    generate(engine, make_spec(PROMPT, GREEDY), free_run=64)  # on a cached prefix
    engine.between_rounds(lambda: None)
    recorder.stop()
    recorded = RecordedStates(tmp_path, "digest")
    text = np.array([*PROMPT, *answer], dtype=np.int32)
    place = recorded.find(text)
    assert place is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(torch.from_numpy(text[:-1]).long()[None], output_hidden_states=True).hidden_states
    expected = torch.cat((states[1][0], states[2][0]), dim=-1)
    torch.testing.assert_close(recorded.read(place, 0, len(text) - 1).float(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "private",
    [
        make_spec(PROMPT, GREEDY, cache_salt="tenant"),
        replace(make_spec(PROMPT, GREEDY), speculation=Speculation(learn=False)),
        make_spec(PROMPT, replace(GREEDY, temperature=1.0, seed=5), SpeculationMode.REJECTION),
    ],
)
def test_what_may_not_be_learned_from_is_in_no_file(
    engine: VerifierEngine, tmp_path: Path, private: SessionSpec
) -> None:
    recorder = recorder_of(engine, tmp_path)
    serve(engine, [private])
    recorder.stop()
    assert not list(tmp_path.iterdir())


def test_files_take_no_more_than_they_may_and_a_new_start_adds_to_them(engine: VerifierEngine, tmp_path: Path) -> None:
    recorder = recorder_of(engine, tmp_path, max_bytes=1)
    serve(engine, [make_spec(prompt_of(seed), GREEDY) for seed in range(2)])
    recorder.stop()  # one file, which was within the limit when it was begun
    [first] = tmp_path.iterdir()
    before = first.read_bytes()
    serve(engine, [make_spec(prompt_of(7), GREEDY)])
    again = recorder_of(engine, tmp_path)
    serve(engine, [make_spec(prompt_of(8), GREEDY)])
    again.stop()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "states-000001.safetensors", "states-000002.safetensors"
    ]  # fmt: skip
    assert first.read_bytes() == before


def test_a_folder_that_is_gone_ends_the_recording_and_nothing_else(
    engine: VerifierEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    recorder = recorder_of(engine, folder)
    serve(engine, [make_spec(PROMPT, GREEDY)])
    recorder.stop()
    assert "hidden states are recorded no further" in caplog.text
    assert len(tokens_of(generate(engine, make_spec(prompt_of(1), GREEDY), free_run=64))) == 20


def test_a_slow_disk_costs_recordings_and_no_memory(
    engine: VerifierEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.verifier_service.learning.recorder._WAITING_BYTES", 1)
    recorder = StatesRecorder(tmp_path, LAYERS, "digest", 1 << 20, engine.rounds.read_rows, LOG)
    engine.when_sessions_end(recorder.take, LAYERS)
    serve(engine, [make_spec(prompt_of(seed), GREEDY) for seed in range(3)])  # nothing is written yet
    recorder.start()
    recorder.stop()
    [file] = tmp_path.iterdir()
    recorded = RecordedStates(tmp_path, "digest")
    assert file.name == "states-000001.safetensors"
    assert len(recorded) == 1


def test_the_verifiers_settings(
    engine: VerifierEngine, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "states"
    config = VerifierConfig(model=str(checkpoint), record_hidden_states=str(folder))
    with pytest.raises(ConfigError, match="--record-hidden-states: heads read three layers, and the target has 2"):
        build_recorder(config, engine, LOG)
    monkeypatch.setattr("outrider.verifier_service.learning.recorder.recorded_layers", lambda _: LAYERS)
    recorder = build_recorder(config, engine, LOG)
    recorder.start()
    serve(engine, [make_spec(PROMPT, GREEDY)])
    recorder.stop()
    assert folder.stat().st_mode & 0o077 == 0  # the files have the texts
    assert RecordedStates(folder, weights_digest(checkpoint)).layers == LAYERS
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="--record-hidden-states: "):
        build_recorder(replace(config, record_hidden_states=str(file)), engine, LOG)
