"""A fingerprint of a loaded model's arithmetic: equal fingerprints, equal bits.

Exact mode's output depends on weights, request and arithmetic, and the arithmetic on dtype, device, kernels,
instruction set, number of ranks and library versions. So a fixed probe runs through the model and the sampling, and its
bits are hashed.

Not here: row invariance (certificate), and which verifiers may replace each other (the gateway's verifier kinds).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.attention.paged_kv import DEFAULT_BLOCK_SIZE
from outrider.engine.model.coded_weights import code_kinds
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.run.runner import ModelRunner
from outrider.engine.sampling.coupling import perturbed_log_weights
from outrider.engine.sampling.laws import LogitsProcessor
from outrider.shared.sampling_params import SamplingParams

# tokens; length of the prompt; crosses tiles of keys (16 to 64 positions)
_NUM_PROMPT_TOKENS = 96
_NUM_DECODED = 3
_FAR_POSITION = 2000  # position; crosses splits of 512 positions; large rotary angles
_DIGEST_BYTES = 8
# Two laws: temperature only, and temperature with truncation.
_LAWS = (SamplingParams(temperature=0.7, seed=1), SamplingParams(temperature=1.3, seed=1, top_k=50, top_p=0.9))


def measure_numerics(loaded: LoadedModel, *, tensor_parallel_size: int = 1, graphs: bool = False) -> str:
    """Returns the fingerprint as dtype/device/kernels/tpN/digest; the parts before the digest are for human readers.

    The dtype is followed by the kinds of packed codes, if there are any, and by the KV cache's type, if it differs:
    bfloat16+i4,i8+kv-int8. Runs one forward of 96 rows and at most four of one to three rows, on its own small cache
    (demo target, two busy cores: 0.04 to 0.6 s).
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for logits in _probe(loaded, graphs):
        digest.update(logits.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        for place, row in enumerate(logits[-_NUM_DECODED:].float().cpu().numpy()):
            digest.update(_sampled_bits(row, place))
    dtype = str(loaded.dtype).removeprefix("torch.")
    kinds = code_kinds(loaded.model)
    if kinds:
        dtype += f"+{','.join(kinds)}"
    if loaded.kv_code_dtype is not None:
        dtype += f"+kv-{loaded.kv_cache_name}"
    kernels = loaded.attention_ops.backend
    return f"{dtype}/{loaded.device.type}/{kernels}/tp{tensor_parallel_size}/{digest.hexdigest()}"


def _probe(loaded: LoadedModel, graphs: bool) -> Iterator[torch.Tensor]:
    """Yields the logits [rows, V] of each forward: a prompt, some tokens one by one, and some rows at a far position.

    The block size is fixed: bits do not depend on it (test_attention_invariance.py), but the far position does.
    """
    block_size = DEFAULT_BLOCK_SIZE
    length = min(_NUM_PROMPT_TOKENS + _NUM_DECODED, loaded.max_model_len)
    num_prompt = max(1, length - _NUM_DECODED)
    num_blocks = -(-length // block_size)
    near = list(range(num_blocks))
    token_ids = [(7919 * place + 1) % loaded.vocab_size for place in range(length)]
    sessions = [SessionRows(token_ids[:num_prompt], 0, near, num_prompt)]
    sessions += [SessionRows([token_ids[place]], place, near, 1) for place in range(num_prompt, length)]
    # Block-aligned, so that the far rows' own block holds nothing else. Their context is the prompt's blocks repeated,
    # which costs neither memory nor forwards.
    far_start = min(_FAR_POSITION, loaded.max_model_len - block_size) // block_size * block_size
    if far_start > length:
        repeated = [place % (num_prompt // block_size or 1) for place in range(far_start // block_size)]
        sessions.append(SessionRows(token_ids[:_NUM_DECODED], far_start, [*repeated, num_blocks], _NUM_DECODED))
    cache = loaded.make_cache(num_blocks + 1, block_size)
    own = ModelRunner(loaded, cache, loaded.make_states(2), graphs=graphs)
    for index, rows in enumerate(sessions):
        # Each forward continues from the previous one, the far rows too.
        state = StateRows((index + 1) % 2, (0,), index % 2, 1) if index else StateRows(None, (), 0, num_prompt)
        yield own.forward(build_batch([replace(rows, state=state)], block_size)).logits


def _sampled_bits(logits: NDArray[np.float32], output_index: int) -> bytes:
    """Returns all values of the race that draws a token; the winner alone would seldom reveal a different logarithm."""
    races = (
        perturbed_log_weights(LogitsProcessor(params, (), ()).log_weights(logits, ()), key=1, output_index=output_index)
        for params in _LAWS
    )
    return b"".join(race.tobytes() for race in races)
