"""Tokenizers of other kinds and sizes, trained here, and models that speak them: random ones, and a demo draft renamed.

Not here: the tests (test_vocabulary_map, test_mapped_draft).
"""

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path
from typing import Any

import safetensors.torch
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.engine.tiny_models import save_tiny_model

DEMO_TARGET = Path(__file__).parents[2] / "models" / "demo-target"
DEMO_DRAFT = DEMO_TARGET.parent / "demo-draft"
SPECIALS = ["<unk>", "<s>", "</s>"]
_STDLIB = Path(sysconfig.get_paths()["stdlib"])


def stdlib_texts(*names: str) -> list[str]:
    return [(_STDLIB / name).read_text(encoding="utf-8") for name in names]


def train_byte_level(vocab_size: int, texts: list[str], *, whole_alphabet: bool = True) -> tokenizers.Tokenizer:
    """BPE over bytes, as GPT-2's."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if whole_alphabet else []
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def train_unigram(vocab_size: int, texts: list[str]) -> tokenizers.Tokenizer:
    """Unigram over words with a space mark, as T5's; its texts begin with <s>."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def train_byte_fallback(vocab_size: int, texts: list[str]) -> tokenizers.Tokenizer:
    """BPE with a space mark and <0xNN> for what it does not know, as Llama 2's; its texts begin with <s>."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size - 259, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(SPECIALS)
    return backend


def save_model(folder: Path, backend: tokenizers.Tokenizer, *, seed: int = 0, **settings: Any) -> Path:
    """A random Llama with a row for each token, and its tokenizer; <s> and </s> are its BOS and EOS."""
    config = {
        "vocab_size": backend.get_vocab_size(with_added_tokens=True),
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": backend.token_to_id("<s>"),
        "eos_token_id": backend.token_to_id("</s>"),
        **settings,
    }
    save_tiny_model("LlamaConfig", config, folder, seed)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def renamed_demo_draft(folder: Path, num_merges: int, seed: int = 0) -> Path:
    """The demo draft with another vocabulary: fewer merges, other ids, and special tokens of other names.

    Its weights are the demo's, row by row, so what it says about the tokens that are left is worth something.
    """
    content = json.loads((DEMO_DRAFT / "tokenizer.json").read_text(encoding="utf-8"))
    model = content["model"]
    dropped = {"".join(merge) for merge in model["merges"][num_merges:]}
    kept = [token for token in model["vocab"] if token not in dropped]
    random.Random(seed).shuffle(kept)
    old_ids = [model["vocab"][token] for token in kept]
    names = {entry["content"]: entry["content"].replace("<|", "<<").replace("|>", ">>") for entry in _added(content)}
    model["vocab"] = {names.get(token, token): token_id for token_id, token in enumerate(kept)}
    model["merges"] = model["merges"][:num_merges]
    for entry in _added(content):
        entry["content"] = names[entry["content"]]
        entry["id"] = model["vocab"][entry["content"]]
    _added(content).sort(key=lambda entry: entry["id"])
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    config = json.loads((DEMO_DRAFT / "config.json").read_text(encoding="utf-8"))
    eos = [old_ids.index(token_id) for token_id in config["eos_token_id"]]
    config |= {"vocab_size": len(kept), "bos_token_id": eos[0], "eos_token_id": eos, "pad_token_id": eos[0]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = safetensors.torch.load_file(DEMO_DRAFT / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = rows[torch.tensor(old_ids)].contiguous()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _added(content: dict[str, Any]) -> list[dict[str, Any]]:
    added: list[dict[str, Any]] = content["added_tokens"]
    return added
