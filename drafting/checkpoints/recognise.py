"""Detects the kind of draft checkpoint in a folder, from config.json and tensor names.

Not here: loading it (one file per kind; a plain model: engine.model.load).
"""

from __future__ import annotations

import re
from pathlib import Path

from outrider.drafting.checkpoints.config_fields import ConfigFields, read_config
from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.target_weights import EMBEDDING_SUFFIXES
from outrider.drafting.checkpoints.tensor_table import TensorTable
from outrider.shared.checkpoint.file_names import linked_parts

BLOCK_KINDS = ("dflash", "dspark")
KINDS = ("draft_model", "medusa", "eagle", "eagle3", "mlp_speculator", "mtp", *BLOCK_KINDS)
# Algorithms that checkpoints name but that are not supported.
_FOREIGN = ("dflash2", "xpress", "domino", "mtp")
# The names of EAGLE-3 in the speculators format; the second drafts all tokens in one forward.
_EAGLE3 = ("eagle3", "peagle")


def recognise(path: str | Path) -> str:
    """Returns one of KINDS. Raises CheckpointRefused for a damaged, unsupported or unknown checkpoint."""
    folder = Path(path)
    config = read_config(folder)
    foreign = foreign_algorithm(config)
    if foreign is not None:
        raise _not_served(folder, foreign)
    if linked_parts(folder):
        return "draft_model"
    table = TensorTable.read(folder)
    if config.get("speculators_model_type") in _EAGLE3:
        return "eagle3"
    block = block_kind(config)
    if block is not None:
        require_not_quantised(folder, config)
        return block
    for kind, matches in _RULES:
        if matches(config, table):
            if kind != "draft_model":  # which the engine reads
                require_not_quantised(folder, config)
            return kind
    architectures = ", ".join(config.architectures()) or "none"
    found = f"architectures {architectures}, model_type {config.get('model_type')!r}, tensors {table.summary()}"
    raise CheckpointRefused(folder, f"not a known kind of draft checkpoint: {found}. Known: {', '.join(KINDS)}")


def foreign_algorithm(config: ConfigFields) -> str | None:
    """Returns the unsupported algorithm that config.json names, if any."""
    named = config.get("speculators_model_type")
    if named is not None and named not in (*_EAGLE3, *BLOCK_KINDS):
        return str(named)[:40]
    eagle_config = config.get("eagle_config")
    if isinstance(eagle_config, dict) and eagle_config.get("parallel_draft_step") not in (None, 0, 1):
        return "ModelOpt's parallel drafts (eagle_config.parallel_draft_step above 1)"
    return _named(config, _FOREIGN)


def block_kind(config: ConfigFields) -> str | None:
    """Returns which kind of one-pass block head config.json names, one of BLOCK_KINDS; None: neither."""
    named = config.get("speculators_model_type")
    if named is not None:
        return str(named) if named in BLOCK_KINDS else None
    nested = config.get("dflash_config")
    if isinstance(nested, dict) and nested.get("projector_type") == "dspark":
        return "dspark"
    return _named(config, BLOCK_KINDS[::-1])


def _named(config: ConfigFields, algorithms: tuple[str, ...]) -> str | None:
    """Returns the first of the algorithms that an architecture, model_type or block of settings is named after."""
    names = [*config.architectures(), str(config.get("model_type"))]
    names.extend(key.removesuffix("_config") for key in config.values if key.endswith("_config"))
    for algorithm in algorithms:
        if any(re.search(rf"(?<![a-z0-9]){algorithm}(?![a-z0-9])", _words(name)) for name in names):
            return algorithm
    return None


def require_not_quantised(folder: Path, config: ConfigFields) -> None:
    """Raises CheckpointRefused for a head of quantised weights."""
    if config.get("quantization_config") is not None or (folder / "hf_quant_config.json").exists():
        raise CheckpointRefused(folder, "its weights are quantised", "use the bfloat16 or float32 checkpoint")


def _words(name: str) -> str:
    """Splits a class name into lower-case words: DFlashDraftModel -> dflash draft model; DFlash is one word."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", " ", name.replace("DF", "Df").replace("DS", "Ds"))
    return name.replace("_", " ").replace("-", " ").lower()


def _not_served(folder: Path, algorithm: str) -> CheckpointRefused:
    cause = f"it is a draft of algorithm {algorithm}, which is not supported. Supported: {', '.join(KINDS)}"
    return CheckpointRefused(folder, cause)


def _has(table: TensorTable, pattern: str) -> bool:
    return any(re.match(pattern, name) for name in table.tensors)


def _is_assistant(config: ConfigFields, table: TensorTable) -> bool:
    """Returns whether it is Gemma 4's assistant, which drafts as an MTP layer does."""
    says_so = str(config.get("model_type")) in ("gemma4_assistant", "gemma4_unified_assistant")
    return says_so or ("pre_projection.weight" in table and "post_projection.weight" in table)


def _is_mlp_speculator(config: ConfigFields, table: TensorTable) -> bool:
    return config.get("model_type") == "mlp_speculator" or _has(table, r"speculator\.(emb|proj|ln|head)\.\d+\.")


def _is_medusa(config: ConfigFields, table: TensorTable) -> bool:
    says_so = config.get("model_type") == "medusa" or config.get("medusa_num_heads") is not None
    return says_so or _has(table, r"medusa_heads\.\d+\.|(medusa_heads\.)?blocks\.\d+\.layers\.\d+\.|\d+\.\d+\.linear\.")


def _is_eagle3(config: ConfigFields, table: TensorTable) -> bool:
    says_so = any(named in name.lower() for name in config.architectures() for named in _EAGLE3)
    return says_so or _has(table, r"midlayer\.|layers\.0\.hidden_norm\.")


def _is_eagle(config: ConfigFields, table: TensorTable) -> bool:
    return "fc.weight" in table and _has(table, r"layers\.0\.self_attn\.")


def _is_draft_model(config: ConfigFields, table: TensorTable) -> bool:
    has_embedding = any(name.endswith(EMBEDDING_SUFFIXES) for name in table.tensors)
    architectures = config.architectures()
    # The last: a multimodal checkpoint, whose text part drafts if the model's own loader finds one.
    causal = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    is_causal = any(name.endswith(causal) for name in architectures)
    # Without an architecture the model's own loader decides by model_type.
    return has_embedding and (is_causal or not architectures) and "fc.weight" not in table


_RULES = (
    ("mtp", _is_assistant),
    ("mlp_speculator", _is_mlp_speculator),
    ("medusa", _is_medusa),
    ("eagle3", _is_eagle3),
    ("eagle", _is_eagle),
    ("draft_model", _is_draft_model),
)
