"""Checkpoints as they lie on the Hub for older models: the names and JSON of their files, with random numbers.

Written from the repositories' listings (facebook/opt-6.7b, meta-llama/Llama-2-7b-hf), by none of transformers' writers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch

Tensors = dict[str, torch.Tensor]

# What the tokenizers are trained on, and what is compared.
TEXTS = [
    "Hello, world! It's 3.14 o'clock, isn't it?",
    "  leading and   inner spaces\tand tabs\n\nand lines\r\n",
    "Grüße aus Köln — naïve café, 東京, привет, 🙂👍🏽",
    "def f(x):\n    return x ** 2  # squares</s>",
    "<s>special</s><pad><unk> tokens in a text",
    "",
]
_SPECIALS = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
_LLAMA_SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_HIDDEN, _FFN, _NUM_LAYERS, _NUM_HEADS, _MAX_POSITIONS = 60, 100, 2, 3, 128


def write_opt(folder: Path, prefix: str = "model.") -> Path:
    """float16 in two .bin shards; vocab.json and merges.txt. prefix: of the tensors; "" as in opt-6.7b itself."""
    folder.mkdir(parents=True)
    backend = tokenizers.ByteLevelBPETokenizer()
    backend.train_from_iterator(TEXTS, vocab_size=330, special_tokens=["<s>", "<pad>", "</s>", "<unk>"])
    backend.save_model(str(folder))
    tokens = {name: _added_token(text) for name, text in _SPECIALS.items()}
    tokenizer_config = {**tokens, "errors": "replace", "add_prefix_space": False, "add_bos_token": True}
    vocab_size = backend.get_vocab_size() + 3  # padded, as OPT's
    _write_json(folder / "tokenizer_config.json", {**tokenizer_config, "tokenizer_class": "GPT2Tokenizer"})
    _write_json(folder / "special_tokens_map.json", tokens)
    _write_json(folder / "config.json", _opt_config(vocab_size))
    ids = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    tensors = {prefix + name: tensor.half() for name, tensor in _opt_tensors(vocab_size).items()}
    write_bin_shards(folder, tensors)
    return folder


def write_llama2(folder: Path) -> Path:
    """The tokenizer alone: a SentencePiece model with byte fallback, trained as Llama's; sentencepiece is needed."""
    import sentencepiece

    folder.mkdir(parents=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 4),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    tokens = {name: _added_token(text) for name, text in _LLAMA_SPECIALS.items()}
    ours = {"add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False, "legacy": False}
    options = {**tokens, **ours, "pad_token": None, "padding_side": "right", "sp_model_kwargs": {}}
    _write_json(folder / "tokenizer_config.json", {**options, "tokenizer_class": "LlamaTokenizer"})
    _write_json(folder / "special_tokens_map.json", tokens)
    _write_json(folder / "config.json", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    return folder


def write_bin_shards(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Two shards and their index, as transformers 4 saved them."""
    names = sorted(tensors)
    files = {
        name: f"pytorch_model-0000{1 + (2 * place) // len(names)}-of-00002.bin" for place, name in enumerate(names)
    }
    for file in set(files.values()):
        torch.save({name: tensors[name] for name in names if files[name] == file}, folder / file)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / "pytorch_model.bin.index.json", {"metadata": {"total_size": num_bytes}, "weight_map": files})


def _opt_config(vocab_size: int) -> dict[str, Any]:
    return {
        "_remove_final_layer_norm": False,
        "activation_function": "relu",
        "architectures": ["OPTForCausalLM"],
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "prefix": "</s>",
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
        "init_std": 0.02,
        "do_layer_norm_before": True,
        "hidden_size": _HIDDEN,
        "ffn_dim": _FFN,
        "word_embed_proj_dim": _HIDDEN,
        "num_hidden_layers": _NUM_LAYERS,
        "num_attention_heads": _NUM_HEADS,
        "max_position_embeddings": _MAX_POSITIONS,
        "vocab_size": vocab_size,
        "model_type": "opt",
        "torch_dtype": "float16",
        "transformers_version": "4.21.0.dev0",
        "use_cache": True,
    }


def _opt_tensors(vocab_size: int) -> Tensors:
    """No lm_head: it is the embedding."""
    shapes: dict[str, tuple[int, ...]] = {
        "decoder.embed_tokens.weight": (vocab_size, _HIDDEN),
        "decoder.embed_positions.weight": (_MAX_POSITIONS + 2, _HIDDEN),
        "decoder.final_layer_norm.weight": (_HIDDEN,),
        "decoder.final_layer_norm.bias": (_HIDDEN,),
    }
    for layer in range(_NUM_LAYERS):
        sizes = {f"self_attn.{part}_proj": (_HIDDEN, _HIDDEN) for part in ("q", "k", "v", "out")}
        sizes |= {"fc1": (_FFN, _HIDDEN), "fc2": (_HIDDEN, _FFN)}
        for part, size in sizes.items():
            shapes |= {f"decoder.layers.{layer}.{part}.weight": size, f"decoder.layers.{layer}.{part}.bias": size[:1]}
        for part in ("self_attn_layer_norm", "final_layer_norm"):
            shapes |= {f"decoder.layers.{layer}.{part}.{kind}": (_HIDDEN,) for kind in ("weight", "bias")}
    generator = torch.Generator().manual_seed(0)
    return {name: _numbers(name, shape, generator) for name, shape in shapes.items()}


def _numbers(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Of about the size that weights have; a norm's weights lie around one."""
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return noise / shape[-1] ** 0.5
    return 0.1 * noise + float(name.endswith("norm.weight"))


def _added_token(text: str) -> dict[str, Any]:
    return {
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": True,
        "__type": "AddedToken",
    }


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content))
