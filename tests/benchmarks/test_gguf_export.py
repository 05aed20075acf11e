"""A GGUF file holds the checkpoint's very weights: bit for bit by gguf's reader, and as a model by transformers'."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from benchmarks.gguf.export import export_gguf
from models.make.expand import Shape, expand
from models.make.family import export_model
from outrider.shared.errors import ConfigError

MODELS = Path(__file__).parents[2] / "models"
# The first word of what each of llama.cpp's names for a Llama's tensors is called by transformers.
HF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module", params=["demo-draft", "expanded"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo draft, and that draft expanded, as the benchmark expands its target."""
    draft_dir = MODELS / "demo-draft"
    if request.param == "demo-draft":
        return draft_dir
    out = tmp_path_factory.mktemp("expanded")
    source = LlamaForCausalLM.from_pretrained(draft_dir, dtype=torch.float32)
    export_model(expand(source, Shape(256, 3, 640, 4)), out, draft_dir)
    return out


@pytest.fixture(scope="module")
def gguf_file(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gguf") / "model.gguf"
    export_gguf(model_dir, out)
    return out


def hf_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        return f"model.layers.{layer}.{HF_NAMES[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def test_every_tensor_is_the_checkpoints_bit_for_bit(model_dir: Path, gguf_file: Path) -> None:
    expected = load_file(model_dir / "model.safetensors")
    head_dim = json.loads((model_dir / "config.json").read_text())["head_dim"]
    seen = set()
    for tensor in gguf.GGUFReader(gguf_file).tensors:
        wanted = expected[hf_name(tensor.name)]
        seen.add(hf_name(tensor.name))
        assert tuple(tensor.shape) == tuple(reversed(wanted.shape))  # GGUF counts dimensions from the fastest
        data = torch.from_numpy(tensor.data.copy())
        if wanted.ndim == 1:
            assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
            assert torch.equal(data.view(torch.int32), wanted.float().view(torch.int32))
            continue
        assert tensor.tensor_type == gguf.GGMLQuantizationType.BF16
        bits = data.view(torch.int16)
        if "attn_q" in tensor.name or "attn_k." in tensor.name:
            rows = range(len(wanted))
            # llama.cpp's row 2i + j of a head is transformers' row i + j * head_dim / 2.
            source = [row - row % head_dim + row % head_dim // 2 + row % 2 * (head_dim // 2) for row in rows]
            wanted = wanted[source]
        assert torch.equal(bits, wanted.view(torch.int16)), tensor.name
    assert seen == set(expected)


def test_transformers_reads_the_same_model_from_it(model_dir: Path, gguf_file: Path) -> None:
    """The shape, eps, rotary base and order of rows too: equal logits at every position, bit for bit in fp32."""
    input_ids = torch.randint(4096, (2, 48), generator=torch.Generator().manual_seed(0))
    own = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    read = LlamaForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    with torch.inference_mode():
        assert torch.equal(read(input_ids).logits, own(input_ids).logits)


def test_the_vocabulary_is_the_tokenizers(model_dir: Path, gguf_file: Path) -> None:
    fields = gguf.GGUFReader(gguf_file).fields
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert {token: token_id for token_id, token in enumerate(tokens)} == tokenizer["model"]["vocab"]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    control = [token_id for token_id, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL]
    assert control == [token["id"] for token in tokenizer["added_tokens"]]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    assert merges == [tuple(pair) for pair in tokenizer["model"]["merges"]]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    config = json.loads((MODELS / "demo-draft" / "config.json").read_text())
    (tmp_path / "tokenizer.json").write_text((MODELS / "demo-draft" / "tokenizer.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    with pytest.raises(ConfigError, match="without biases"):
        export_gguf(tmp_path, tmp_path / "out.gguf")
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(MODELS / "demo-draft" / "model.safetensors")
    save_file({name: tensor.float() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="float32"):
        export_gguf(tmp_path, tmp_path / "out.gguf")
