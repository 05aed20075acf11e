"""The row-invariance certificate of the demo target: both dtypes, forward by forward and as CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu_report.report import Finding, Part, Run, judged
from outrider.engine.certificate import certify
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner

TARGET = Path(__file__).parents[2] / "models" / "demo-target"
_NUM_BLOCKS = 64


def certificate_of(loaded: LoadedModel, name: str, *, graphs: bool) -> Finding:
    """Whether row invariance holds on a loaded model, and where it first does not."""
    runner = ModelRunner(loaded, loaded.make_cache(_NUM_BLOCKS), graphs=graphs)
    certificate = certify(loaded, runner)
    checks = {check.name: check.holds for check in certificate.checks}
    lean = {} if loaded.lean is None else asdict(loaded.lean)
    return judged(name, "every bit equal", certificate.describe(), certificate.holds, checks=checks, lean=lean)


def _measure(dtype: str, run: Run) -> Iterable[Finding]:
    loaded = load_model(str(TARGET), dtype=dtype, device=run.device.type)
    for graphs in (False, True):
        yield certificate_of(loaded, f"{dtype}, {'CUDA graphs' if graphs else 'eager'}", graphs=graphs)


PARTS = [
    Part("certificate", f"demo target, {dtype}", 15.0, functools.partial(_measure, dtype))
    for dtype in ("bfloat16", "float32")
]
