"""A training step's memory is bounded by the budget of its slices, not by the vocabulary.

Measured in a process of its own: the peak of resident memory of `outrider train train` with its default settings and
one step, at the vocabularies of Qwen 2.5 and Gemma 3 over a tiny body.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.training.export import copy_files, write_model
from outrider.training.heads.interface import SLICE_BYTES
from tests.training.tiny import TOKENIZER_DIR

HIDDEN_SIZE = 32
# bytes; python, torch, transformers and accelerate, and rows of hidden states; a choice above what imports alone take
_PROGRAM_BYTES = 1 << 30
# float32 copies of [vocab, hidden]: the target's two, the head's two, gradient, its sum, AdamW's two, slack for a cast
_NUM_MATRICES = 10
# The peak of this program alone: getrusage's ru_maxrss keeps that of the process which started it, through exec.
_CODE = r"""
import re, sys
from pathlib import Path
from outrider.training.commands.app import app
app(sys.argv[1:], standalone_mode=False)
print(int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
"""


def write_wide_target(path: Path, vocab_size: int) -> None:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    write_model(LlamaForCausalLM(config), path, torch.bfloat16)
    copy_files(TOKENIZER_DIR, path, ("tokenizer.json", "tokenizer_config.json"))


# Half a minute on an idle core: 4,080 positions at five depths.
@pytest.mark.timeout(1800)
@pytest.mark.storm
def test_the_peak_of_a_step_follows_from_the_budget(tmp_path: Path) -> None:
    vocab_size = 152_064
    write_wide_target(tmp_path / "target", vocab_size)
    rows = np.random.default_rng(0).integers(0, vocab_size, (8, 512))
    np.save(tmp_path / "data.npy", rows.astype(np.int32))
    options = {"--target": tmp_path / "target", "--data": tmp_path / "data.npy", "--output": tmp_path / "run"}
    arguments = [str(each) for pair in options.items() for each in pair]
    done = subprocess.run(
        [sys.executable, "-c", _CODE, "train", "--method", "eagle3", "--steps", "1", "--batch-size", "8", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split()[-1])
    bound = _PROGRAM_BYTES + SLICE_BYTES + _NUM_MATRICES * 4 * vocab_size * HIDDEN_SIZE
    print(f"vocabulary {vocab_size}: peak {peak / 2**30:.2f} GiB, bound {bound / 2**30:.2f} GiB")
    assert peak <= bound, f"{peak / 2**30:.2f} GiB, bound {bound / 2**30:.2f} GiB"
