"""vLLM's /tokenize, /detokenize and /tokenizer_info: bodies to answers."""

from __future__ import annotations

from typing import Any

from outrider.gateway.openai.answer_types import DetokenizeAnswer, TokenizeAnswer
from outrider.gateway.openai.checks import check_model, check_token_ids
from outrider.gateway.openai.convert import chat_token_ids
from outrider.gateway.openai.schema import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest, parse_body
from outrider.gateway.request.served import Served
from outrider.gateway.request.tokenizer import Tokenizer

# Names of files on this machine.
_FILES = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")


def tokenize(body: object, served: Served) -> TokenizeAnswer:
    """Tokenizes a text, or messages. Raises InvalidRequest or UnknownModel."""
    if isinstance(body, dict) and "messages" in body:
        chat = parse_body(TokenizeChatRequest, body)
        check_model(chat.model, served.model)
        token_ids, with_strings = chat_token_ids(chat, served.tokenizer), chat.return_token_strs
    else:
        text = parse_body(TokenizeRequest, body)
        check_model(text.model, served.model)
        token_ids = served.tokenizer.encode(text.prompt, text.add_special_tokens)
        with_strings = text.return_token_strs
    strings = [served.tokenizer.token_string(token_id) for token_id in token_ids] if with_strings else None
    return {
        "count": len(token_ids),
        "max_model_len": served.model.max_model_len,
        "tokens": token_ids,
        "token_strs": strings,
    }


def detokenize(body: object, served: Served) -> DetokenizeAnswer:
    """Raises InvalidRequest or UnknownModel."""
    asked = parse_body(DetokenizeRequest, body)
    check_model(asked.model, served.model)
    check_token_ids(asked.tokens, served.model, "tokens")
    return {"prompt": served.tokenizer.decode(asked.tokens, asked.skip_special_tokens)}


def tokenizer_info(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the checkpoint's tokenizer_config.json with tokens as their text, and the served chat template."""
    info = {name: _plain(value) for name, value in tokenizer.config.items() if name not in _FILES}
    info.setdefault("tokenizer_class", "PreTrainedTokenizerFast")  # what transformers makes of a tokenizer.json alone
    if tokenizer.chat_template_source is not None:
        info["chat_template"] = tokenizer.chat_template_source
    return info


def _plain(value: Any) -> Any:
    """A token is its text, or an object that has it as `content`."""
    if isinstance(value, dict):
        text = value.get("content")
        return text if isinstance(text, str) else {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value
