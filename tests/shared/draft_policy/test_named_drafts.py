"""Names of checkpoints for drafting, as people type them."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.shared.draft_policy.named_drafts import NamedDraft, are_told_apart, with_paths


@pytest.mark.parametrize(
    ("entry", "draft"),
    [
        ("models/demo-draft", ("", "models/demo-draft")),
        ("code=models/demo-draft", ("code", "models/demo-draft")),
        ("my-chat_2=ORG/NAME", ("my-chat_2", "ORG/NAME")),
        ("code=run=3/head", ("code", "run=3/head")),
        ("runs/lr=3/head", ("", "runs/lr=3/head")),
        ("./lr=3", ("", "./lr=3")),
        ("code=", ("", "code=")),
        ("=head", ("", "=head")),
    ],
)
def test_a_name_stands_before_the_first_equals_sign(entry: str, draft: tuple[str, str]) -> None:
    assert NamedDraft.of(entry) == draft
    assert str(NamedDraft.of(entry)) == entry


def test_a_folder_that_is_there_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lr=3").mkdir()
    monkeypatch.chdir(tmp_path)
    assert NamedDraft.of("lr=3") == ("", "lr=3")


def test_names_stay_while_paths_are_replaced() -> None:
    assert with_paths(["code=a", "b"], str.upper) == ("code=A", "B")


def test_two_of_a_kind_need_names() -> None:
    assert are_told_apart([NamedDraft("", "a")])
    assert are_told_apart([NamedDraft("code", "a"), NamedDraft("chat", "b")])
    assert not are_told_apart([NamedDraft("code", "a"), NamedDraft("", "b")])
    assert not are_told_apart([NamedDraft("code", "a"), NamedDraft("code", "b")])
