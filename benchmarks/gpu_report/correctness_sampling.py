"""The sampling kernels against their fp64 references: tokens and decisions, but for near ties.

Drawing is a race that float32 may decide otherwise where the two best values are within its rounding; so what counts is
how far behind the reference's winner the found token is. Decisions have to be equal.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from benchmarks.gpu_report.report import Finding, Part, Run, judged
from outrider.kernels.coupled_sample import reference as sample_reference
from outrider.kernels.coupled_sample.triton import coupled_sample
from outrider.kernels.rejection_sample import reference as rejection_reference
from outrider.kernels.rejection_sample.drafts import ChainDrafts
from outrider.kernels.rejection_sample.triton import rejection_sample
from outrider.kernels.sampling_support.transforms import Transforms
from tests.kernels.sampling.sampling_cases import FIELDS

LAWS = FIELDS[:6]
_NEAR_TIE = 1e-5
_LAW_TOTAL = 1 << 15


def random_keys(num_rows: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**31), 2**31, (num_rows, 2), generator=generator).to(torch.int32).to(device)


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(vocab_size)
    return (torch.randn(num_rows, vocab_size, generator=generator, device=device) * 3).to(dtype)


def _coupled_sample(run: Run) -> Iterable[Finding]:
    vocab_size, repeats = (300, 1) if run.tiny else (128256, 8)
    laws = Transforms.of_rows(LAWS * repeats, run.device)
    num_rows = len(laws.temperatures)
    num_differ, widest = 0, 0.0
    for dtype in (torch.bfloat16, torch.float32):
        logits, keys = random_logits(num_rows, vocab_size, dtype, run.device), random_keys(num_rows, run.device)
        found = coupled_sample(logits, laws, keys)
        values = sample_reference.race_values(logits, laws, keys)
        behind = values.gather(1, found[:, None])[:, 0] - values.amin(1)
        num_differ += int((found != sample_reference.coupled_sample(logits, laws, keys)).sum())
        # Argmax rows: their one token has weight 1, all others arrive never.
        widest = max(widest, float(behind.max()))
    measured = f"{num_differ} of {2 * num_rows} differ, by {widest:.1e} at most"
    yield judged("coupled_sample", "differs in near ties alone", measured, widest < _NEAR_TIE, widest=widest)


def _rejection_sample(run: Run) -> Iterable[Finding]:
    vocab_size, num_sessions, length, width = (64, 4, 3, 4) if run.tiny else (4096, 64, 5, 8)
    generator = torch.Generator().manual_seed(3)
    rows = length + 1
    num_rows = num_sessions * rows
    logits = random_logits(num_rows, vocab_size, torch.float32, run.device)
    # Draft laws over the target's own likeliest tokens, so that some are accepted and some are not.
    law_ids = logits.topk(width, dim=1).indices.roll(1, 0).cpu()
    shares = torch.rand(num_rows, width, generator=generator)
    counts = (shares / shares.sum(1, keepdim=True) * (_LAW_TOTAL - width)).long() + 1
    counts[:, 0] += _LAW_TOTAL - counts.sum(1)
    drawn = torch.multinomial(counts.float(), 1, generator=generator)
    drafts = ChainDrafts(
        row_starts=torch.arange(0, num_rows + 1, rows, dtype=torch.int32, device=run.device),
        token_ids=law_ids.gather(1, drawn)[:, 0].to(run.device),
        law_token_ids=law_ids.to(torch.int32).to(run.device),
        law_counts=counts.to(torch.int32).to(run.device),
        law_total=_LAW_TOTAL,
        block_rules=torch.tensor([session % 2 for session in range(num_sessions)], dtype=torch.int32).to(run.device),
    )
    laws = Transforms.of_rows([(1.0, 0, 1.0, 0.0)] * num_rows, run.device)
    uniforms = torch.rand(num_rows, dtype=torch.float64, generator=generator).to(run.device)
    keys = random_keys(num_sessions, run.device)
    accepted, tokens = rejection_sample(logits, laws, drafts, uniforms, keys)
    expected = rejection_reference.rejection_sample(logits, laws, drafts, uniforms, keys)
    agree = int(((accepted == expected[0]) & (tokens == expected[1])).sum())
    # Were nothing, or everything, accepted, the rules would not have been asked.
    is_mixed = 0 < int(accepted.sum()) < num_sessions * length
    measured = f"{agree} of {num_sessions} sessions equal, {int(accepted.sum())} tokens accepted"
    yield judged("rejection_sample", "every decision equal", measured, agree == num_sessions and is_mixed)


PARTS = [
    Part("correctness", "coupled_sample", 5.0, _coupled_sample),
    Part("correctness", "rejection_sample", 5.0, _rejection_sample),
]
