"""architectures.md: which architectures are served and which are refused, and why.

`python -m tests.engine.architecture_survey` runs them, then writes the table and the page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

from docs.generate.markdown import cell, code, table

TABLE = Path(__file__).with_name("architectures.json")
PAGE = Path(__file__).parents[1] / "architectures.md"
# outcome -> heading and introduction of its section
_SECTIONS = {
    "exact": ("Served", "In every mode: the certificate holds to the bit, in float32 on the CPU."),
    "inexact": (
        "Served, but not in exact mode",
        "The certificate fails, so exact mode is refused.",
    ),
    "refused": ("Refused", "When they are loaded, with this reason."),
    "untried": ("Not tried", "The survey has no tiny model of them. They may load; the checks at load decide."),
}

_INTRODUCTION = """# Architectures

Model code is transformers' own ({version}). A checkpoint is served if its class passes the checks at load: the
attention of every layer goes through transformers' interface, once, with what the kernels need to know, or is one of
those that `engine/model/own_attention` knows. Recurrent layers must be known: a mixer of ours takes their place, and
must compute the same ([architecture](architecture.md#recurrent-layers)). Latent attention caches its latents
([architecture](architecture.md#latent-attention)). On a GPU the certificate
decides about exact mode; `outrider certify` shows it.

This page is the result for a tiny random model of each causal language model, by the `model_type` of config.json. The
models that are served have the logits of transformers' eager attention. A checkpoint of a served type can still be
refused for what its config says, as dynamic RoPE. Multimodal types are left out where their language model has a type
of its own. Windows and chunks are 7 tokens here.
"""
_MULTIMODAL = """
## The text part of multimodal models ({count})

Their text has the logits of transformers' whole model. Images, audio and video are refused with the request. The text
model must be one that is served: Mistral 3's are `mistral`, `ministral3` and `mistral4`.

{types}
"""


class Row(TypedDict):
    model_type: str  # as in config.json
    class_name: str
    outcome: str  # a key of _SECTIONS
    reason: str  # why it is not "exact"


class Survey(TypedDict):
    transformers: str  # version
    rows: list[Row]
    multimodal: list[str]  # model types whose text part is served


def read_survey() -> Survey:
    survey: Survey = json.loads(TABLE.read_text(encoding="utf-8"))
    return survey


def architectures_page(survey: Survey) -> str:
    text = _INTRODUCTION.format(version=survey["transformers"])
    for outcome, (heading, introduction) in _SECTIONS.items():
        rows = [row for row in survey["rows"] if row["outcome"] == outcome]
        if rows:
            text += f"\n## {heading} ({len(rows)})\n\n{introduction}\n\n" + _rows(rows)
        if outcome == "exact":
            types = survey["multimodal"]
            text += _MULTIMODAL.format(count=len(types), types=", ".join(map(code, types)))
    return text


def _rows(rows: list[Row]) -> str:
    if not any(row["reason"] for row in rows):
        return ", ".join(code(row["model_type"]) for row in rows) + "\n"
    cells = ([code(row["model_type"]), code(row["class_name"]), cell(row["reason"])] for row in rows)
    return table(("`model_type`", "class", "reason"), cells)
