"""Exact mode's sampler at 256 rows of 128,256 logits: without truncation, with top-p, with top-k.

Device time (graph replays over rotated logits), and wall time of a call as the verifier makes it, eager.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from benchmarks.gpu_report.correctness_sampling import random_keys, random_logits
from benchmarks.gpu_report.report import Finding, Part, Run, judged
from benchmarks.gpu_report.timing import graph_us, num_copies, wall_us
from outrider.kernels.coupled_sample.triton import coupled_sample
from outrider.kernels.sampling_support.transforms import Transforms

MOST_US = 200.0
_NUM_ROWS, _VOCAB_SIZE = 256, 128256
LAWS = {
    "temperature 1": (1.0, 0, 1.0, 0.0),
    "temperature 0.8, top-p 0.95": (0.8, 0, 0.95, 0.0),
    "temperature 0.8, top-k 50": (0.8, 50, 1.0, 0.0),
}


def _measure(run: Run) -> Iterable[Finding]:
    keys = random_keys(_NUM_ROWS, run.device)
    for dtype in (torch.bfloat16, torch.float32):
        first = random_logits(_NUM_ROWS, _VOCAB_SIZE, dtype, run.device)
        logits = [first, *(first.roll(turn, 0) for turn in range(1, num_copies(first.nbytes)))]
        for name, law in LAWS.items():
            laws = Transforms.of_rows([law] * _NUM_ROWS, run.device)
            calls = [lambda rows=rows, laws=laws: coupled_sample(rows, laws, keys) for rows in logits]
            taken = graph_us(calls, 10 if run.quick else 20)
            eager = wall_us({"eager": calls[0]}, 10 if run.quick else 30)["eager"]
            short = str(dtype).removeprefix("torch.")
            measured = f"{taken:.0f} us ({eager:.0f} us launched one by one)"
            target = f"< {MOST_US:.0f} us, 256 rows x 128k"
            yield judged(f"{short}, {name}", target, measured, taken < MOST_US, us=taken, eager_us=eager)


PARTS = [Part("sampling", "coupled_sample", 15.0, _measure)]
