"""Tokenizers of the other families, built here: SentencePiece BPE with byte fallback (as Llama 2), WordPiece."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from outrider.gateway.request.tokenizer import Tokenizer

_WORDS = ("▁Hello", "▁world", "▁the", "▁a", "lo", "▁", "H", "e", "l", "o", "w", "r", "d", "t", "h", "a", ".", "é", "漢")


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """<s> in front by the post-processor; characters outside of the vocabulary become their bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [("l", "o")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def byte_fallback_tokenizer() -> Tokenizer:
    return Tokenizer(byte_fallback_backend(), {"bos_token": "<s>", "eos_token": "</s>"}, None)


def wordpiece_tokenizer() -> Tokenizer:
    """Its decoder puts spaces between words, so a token's text depends on its neighbours."""
    tokens = ["[UNK]", "[SEP]", "play", "##ing", "##ed", "the", "game", ".", "漢", "##字"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    return Tokenizer(backend, {"sep_token": "[SEP]"}, None)
