"""The demo checkpoints as a family that thinks and calls: same weights, four seldom tokens renamed to Hermes' markers.

What they write is what the demo writes; its prompts open the thinking, and it never ends it of its own accord.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% if tools %}<|system|>\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n"
    "{{ '<think></think>' if enable_thinking is false else '<think>' }}{% endif %}"
)


def save_thinking(checkpoint: Path, folder: Path) -> Path:
    """The markers take the places of the last merges, on which no other merge depends."""
    shutil.copytree(checkpoint, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model, flags = tokenizer["model"], tokenizer["added_tokens"][-1]
    first = len(model["vocab"]) - len(MARKERS)
    model["vocab"] = {token: place for token, place in model["vocab"].items() if place < first}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    tokenizer["added_tokens"] += [{**flags, "id": first + place, "content": text} for place, text in enumerate(MARKERS)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder
