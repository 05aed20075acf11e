"""Checks that draft checkpoints and --speculative-config fit each other. Not here: whether a draft fits the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.client.doctor.check import Check
from outrider.client.stack.commands import StackSettings, methods_without_draft
from outrider.shared.checkpoint.mtp_layers import count_mtp_layers
from outrider.shared.draft_policy.draft_methods import (
    AUTO,
    FROM_CHECKPOINT,
    FROM_TARGET,
    OFF,
    WITHOUT_CHECKPOINT,
    with_lookup,
    without_lookup,
)
from outrider.shared.draft_policy.named_drafts import NamedDraft, are_told_apart
from outrider.shared.errors import ConfigError
from outrider.shared.speculative_config import parse_speculative_config


def check_speculation(settings: StackSettings, checkpoints: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Checks drafts and method. checkpoints: drafting.probe's result for each draft, `path` and `kind` or `problem`."""
    kinds: dict[str, list[NamedDraft]] = {}
    for draft, checkpoint in zip(settings.drafts, checkpoints, strict=True):
        kind = checkpoint.get("kind")
        name = f"draft {draft.path}"
        if kind is None:
            yield Check(name, "fail", checkpoint["problem"], "give another --draft-model")
            continue
        others = kinds.setdefault(kind, [])
        others.append(draft)
        if are_told_apart(others):
            yield Check(name, "ok", f"recognised as {kind}" + (f", named {draft.name}" if draft.name else ""))
        else:
            found = f"{others[0].path} and {draft.path} are both {kind}"
            advice = f"give each a name of its own: code={others[0].path},chat={draft.path}"
            yield Check(name, "fail", found, advice)
    yield _method(settings, list(kinds))


def _method(settings: StackSettings, kinds: Sequence[str]) -> Check:
    try:
        method = parse_speculative_config(settings.speculative_config).method
    except ConfigError as error:
        return Check("method", "fail", error.message, "correct --speculative-config")
    base = without_lookup(method)
    if base in FROM_TARGET and base not in kinds:
        try:
            count_mtp_layers(Path(settings.model))
        except ConfigError as error:
            return Check("method", "fail", f"{settings.model}: {error.message}", "choose another method")
    without_draft = WITHOUT_CHECKPOINT if settings.draft_model else methods_without_draft(settings)
    served = settings.methods or (*kinds, *without_draft)
    combined = map(with_lookup, served) if "suffix" in served else ()
    if method in (AUTO, OFF, *served, *combined):
        return Check("method", "ok", f"{method}, of {', '.join(served)}")
    found = f"--speculative-config: nothing here drafts with {method}; there are {', '.join(served)}"
    advice = "choose one of them"
    if base in FROM_CHECKPOINT:
        advice += f', or give a checkpoint of {base} (--draft-model, "model" in --speculative-config of `serve`)'
    if base in FROM_TARGET:
        advice = 'it drafts from the target\'s own files: give no other draft (--draft-model "")'
    return Check("method", "fail", found, advice)
