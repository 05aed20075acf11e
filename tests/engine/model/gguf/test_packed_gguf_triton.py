"""A GGUF file that stays packed under the GPU's kernels (interpreted where there is no GPU), its tied embedding too.

Oracle: the dequantised weights in float32, in transformers' own modules.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_models import gguf_model
from gguf_writer import VOCABULARY

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.model.coded_weights import CodedRows, RowInvariantCodes
from outrider.engine.model.load import load_model
from outrider.engine.model.row_invariant_modules import RowInvariantLinear
from outrider.engine.run.runner import ModelRunner
from tests.kernels.triton_device import device

pytestmark = [pytest.mark.gpu, pytest.mark.storm]
_TOKENS = [(11 * place) % (len(VOCABULARY) - 3) + 3 for place in range(9)]


def test_tied_weights_of_several_kinds_stay_packed(tmp_path: Path) -> None:
    others = {"token_embd": "Q8_0", "attn_v": "Q8_0", "ffn_down": "Q4_1"}
    file = gguf_model(tmp_path, "llama-biases-tied", "Q4_0", None, others)[1]
    loaded = load_model(str(file), device=device().type, attention_backend="triton")
    linears = [part for part in loaded.model.modules() if isinstance(part, RowInvariantLinear)]
    assert all(isinstance(part, RowInvariantCodes) for part in linears)
    rows = loaded.model.get_input_embeddings().weight
    assert isinstance(rows, CodedRows)
    assert loaded.model.get_output_embeddings().packed is rows.packed
    batch = build_batch([SessionRows(_TOKENS, 0, [0], 9)], 16, loaded.device)
    logits = ModelRunner(loaded, loaded.make_cache(1, 16)).forward(batch).logits.float().cpu()
    meant = load_model(str(file), dtype="float32", device="cpu", row_invariant=False)
    batch = build_batch([SessionRows(_TOKENS, 0, [0], 9)], 16)
    exact = ModelRunner(meant, meant.make_cache(1, 16)).forward(batch).logits
    assert (logits - exact).square().mean().sqrt() <= 2**-6 * exact.square().mean().sqrt()
