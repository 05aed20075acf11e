"""Which arithmetic a loaded model computes with, measured: equal text, equal bits, whatever the versions say.

Exact mode's output is a function of weights, request and arithmetic, and the arithmetic depends on more than anybody
can list: dtype, device, kernels, instruction set, number of ranks, versions of torch and of ours. So a fixed probe goes
through the model and through the sampling after it, and the bits that come out are hashed.

Not here: proving that a row's bits are its own (certificate), and who may take over from whom (the gateway's
verifier_kinds).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import SessionRows, build_batch
from engine.coupling import perturbed_log_weights
from engine.model import LoadedModel
from engine.paged_kv import DEFAULT_BLOCK_SIZE
from engine.runner import ModelRunner
from engine.sampling import LogitsProcessor
from shared.sampling_params import SamplingParams

# Long enough to cross tiles of keys (16 to 64 positions) and, far out, a split of 512 and large rotary angles.
_NUM_PROMPT_TOKENS = 96
_NUM_DECODED = 3
_FAR_POSITION = 2000
_DIGEST_BYTES = 8
# Temperature alone, and every way of truncating.
_LAWS = (SamplingParams(temperature=0.7, seed=1), SamplingParams(temperature=1.3, seed=1, top_k=50, top_p=0.9))


def measure_numerics(loaded: LoadedModel, *, tensor_parallel_size: int = 1, graphs: bool = False) -> str:
    """Text of the form dtype/device/kernels/tpN/digest; the words before the digest are there to be read.

    Takes one forward of 96 rows and at most four of one to three, on a small cache of its own: 0.04 to 0.6 s for the
    demo target on two cores that had other work too.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for logits in _probe(loaded, graphs):
        digest.update(logits.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        for place, row in enumerate(logits[-_NUM_DECODED:].float().cpu().numpy()):
            digest.update(_sampled_bits(row, place))
    dtype = str(loaded.dtype).removeprefix("torch.")
    kernels = loaded.attention_ops.backend
    return f"{dtype}/{loaded.device.type}/{kernels}/tp{tensor_parallel_size}/{digest.hexdigest()}"


def _probe(loaded: LoadedModel, graphs: bool) -> Iterator[torch.Tensor]:
    """Logits [rows, V] of each forward: a prompt, some tokens one by one, and some rows far from the beginning.

    Always in blocks of one size: bits do not depend on it (tests/kernels/test_attention_invariance.py), and where the
    far rows lie does.
    """
    block_size = DEFAULT_BLOCK_SIZE
    length = min(_NUM_PROMPT_TOKENS + _NUM_DECODED, loaded.max_model_len)
    num_prompt = max(1, length - _NUM_DECODED)
    num_blocks = -(-length // block_size)
    near = list(range(num_blocks))
    token_ids = [(7919 * place + 1) % loaded.vocab_size for place in range(length)]
    sessions = [SessionRows(token_ids[:num_prompt], 0, near, num_prompt)]
    sessions += [SessionRows([token_ids[place]], place, near, 1) for place in range(num_prompt, length)]
    # Block-aligned, so that the far rows' own block holds nothing else; what stands before them is the prompt's keys
    # and values over and over, which costs neither memory nor forwards.
    far_start = min(_FAR_POSITION, loaded.max_model_len - block_size) // block_size * block_size
    if far_start > length:
        repeated = [place % (num_prompt // block_size or 1) for place in range(far_start // block_size)]
        sessions.append(SessionRows(token_ids[:_NUM_DECODED], far_start, [*repeated, num_blocks], _NUM_DECODED))
    cache = loaded.make_cache(num_blocks + 1, block_size)
    own = ModelRunner(loaded, cache, graphs=graphs)
    for rows in sessions:
        yield own.forward(build_batch([rows], block_size)).logits


def _sampled_bits(logits: NDArray[np.float32], output_index: int) -> bytes:
    """The race that draws a token, in full: which token wins would seldom tell two logarithms apart."""
    races = (
        perturbed_log_weights(LogitsProcessor(params, (), ()).log_weights(logits, ()), key=1, output_index=output_index)
        for params in _LAWS
    )
    return b"".join(race.tobytes() for race in races)
