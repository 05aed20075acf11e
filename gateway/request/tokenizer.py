"""Text to token ids and back, from a checkpoint's own files; no torch, no transformers.

Reads tokenizer.json, tokenizer_config.json and chat_template.jinja. The post-processor in tokenizer.json decides which
special tokens a prompt gets (BOS). Not here: decoding a growing output (detokenizer.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from outrider.gateway.request.chat_template import ChatTemplate, Message
from outrider.gateway.request.token_bound import most_chars_per_token
from outrider.shared.checkpoint.file_names import older_tokenizer
from outrider.shared.checkpoint.json_file import read_object
from outrider.shared.checkpoint.tokenizer_digest import digest_of
from outrider.shared.errors import ConfigError, InvalidRequest

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Names of a checkpoint's templates, where it has several.
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_MORE_TEMPLATES = "additional_chat_templates"
_SPACE_MARK = "▁"


class Tokenizer:
    """One checkpoint's tokenizer; thread-safe."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        config: Mapping[str, Any] | None = None,
        tool_template: str | None = None,
    ) -> None:
        """special_tokens: maps names ("eos_token") to the token's text. config: tokenizer_config.json.

        tool_template: of chats with tools, where the checkpoint has one.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.config = dict(config or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # Tokens that no text can spell, for grammars either: llguidance takes these, and no others, for special.
        self.control_tokens = {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.chat_template_source = chat_template or None
        self.tool_template_source = tool_template or self.chat_template_source
        sources = (self.chat_template_source, self.tool_template_source)
        self._templates = {source: ChatTemplate(source, special_tokens) for source in sources if source}
        description = json.loads(backend.to_str())
        vocab = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
        self.digest = digest_of(vocab.items())  # added tokens too: with another, the same ids are another text
        self._bytes_per_token = _token_bytes_table(vocab, description)
        # Characters of text per token at most; None if unbounded.
        self.most_chars_per_token = most_chars_per_token(description, self._bytes_per_token)

    @classmethod
    def load(cls, model_path: str | Path, *, chat_template: str | None = None) -> Tokenizer:
        """Loads the tokenizer of a checkpoint folder. chat_template None: the folder's own. Raises ConfigError when
        tokenizer.json is missing or broken.
        """
        folder = Path(model_path)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json; {_conversion(folder)}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} cannot be read: {error}") from error
        config = read_object(folder / "tokenizer_config.json")
        templates = chat_templates(folder, config) if chat_template is None else {_DEFAULT: chat_template}
        source = templates.get(_DEFAULT, next(iter(templates.values())) if len(templates) == 1 else None)
        return cls(backend, special_tokens_of(config), source, config, templates.get(_WITH_TOOLS))

    @property
    def has_token_bytes(self) -> bool:
        """True if a text is the concatenation of its tokens' bytes (byte-level BPE, SentencePiece)."""
        return self._bytes_per_token is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text of special tokens inside `text` becomes those tokens, as in transformers."""
        # The fast variant computes no offsets and takes half the time for a short prompt.
        try:
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:  # the library's panics are no Exception; they have no class to import
            if type(error).__name__ != "PanicException":
                raise
            raise InvalidRequest(f"the model's tokenizer fails on this text: {error}") from None
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Unknown ids (padding of the vocabulary) decode to nothing."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_string(self, token_id: int) -> str:
        """Returns the vocabulary entry as in the file ("Ġthe"); empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that this token adds to a text, special tokens included; empty for an unknown id."""
        if self._bytes_per_token is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        return self._bytes_per_token.get(token_id, b"")

    def token_text(self, token_id: int) -> str:
        """Returns `token_bytes` for display: incomplete characters show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text; encode it without special tokens, which the template adds.

        variables: the template's own (enable_thinking, ...), as in chat_template_kwargs.

        Raises InvalidRequest when there is no template or it refuses the messages.
        """
        source = self.tool_template_source if tools else self.chat_template_source
        if source is None:
            raise InvalidRequest("the served model has no chat template; use /v1/completions instead", param="messages")
        return self._templates[source].render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
            tools=tools,
        )


def _conversion(folder: Path) -> str:
    older = older_tokenizer(folder)
    if not older:
        return "give the folder of an HF checkpoint"
    return (
        f"its {' and '.join(older)} must be converted: `python -m outrider.engine.model {folder}`, where the engine is "
        "installed, prints the folder to give instead"
    )


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Maps names to text; an entry of the config is text, an object with `content`, or null."""
    found = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns chat templates by name. Files win over the config, as in transformers. Raises ConfigError."""
    found = config.get("chat_template") or {}
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    named = dict(found) if isinstance(found, dict) else {_DEFAULT: found}
    more = sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))
    files = {path.stem: path for path in more} | {_DEFAULT: folder / "chat_template.jinja"}
    named |= {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    if not all(isinstance(name, str) and isinstance(source, str) for name, source in named.items()):
        raise ConfigError(f"{folder}: chat_template must be text or a list of named templates")
    return named


# ---- bytes per token --------------------------------------------------------------------------------------------


def _token_bytes_table(vocab: Mapping[int, str], description: Mapping[str, Any]) -> dict[int, bytes] | None:
    """Returns each id's bytes, or None for decoders (WordPiece, BPE suffixes) that depend on a token's neighbours."""
    kinds = _decoder_kinds(description)
    if kinds == ["ByteLevel"]:
        alphabet = _byte_level_alphabet()
        return {token_id: _byte_level_bytes(token, alphabet) for token_id, token in vocab.items()}
    if kinds == ["Metaspace"] or "ByteFallback" in kinds:
        has_bytes = "ByteFallback" in kinds
        return {token_id: _sentencepiece_bytes(token, has_bytes) for token_id, token in vocab.items()}
    return None


def _decoder_kinds(description: Mapping[str, Any]) -> list[str]:
    decoder = description.get("decoder")
    if decoder is None:
        return []
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [part["type"] for part in parts]


def _byte_level_alphabet() -> dict[str, int]:
    """Returns GPT-2's map from printable stand-ins to bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


def _byte_level_bytes(token: str, alphabet: Mapping[str, int]) -> bytes:
    # An added token may have characters outside the alphabet; the decoder then uses them unchanged.
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:
        return token.encode()


def _sentencepiece_bytes(token: str, has_bytes: bool) -> bytes:
    if has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace(_SPACE_MARK, " ").encode()
