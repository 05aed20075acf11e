"""Which tokens two real tokenizers share, and texts in the draft's ids; the tokenizers' own `decode` is the oracle."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.session import DraftSession
from outrider.drafting.vocabulary.mapping import DraftIds, VocabularyMap, map_vocabulary
from outrider.shared.messages import DraftStep, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from tests.drafting.other_vocabularies import (
    DEMO_DRAFT,
    DEMO_TARGET,
    renamed_demo_draft,
    save_model,
    stdlib_texts,
    train_byte_fallback,
    train_byte_level,
    train_unigram,
)

KINDS = ("byte_level", "unigram", "byte_fallback")
# Text that all of them can write, and text that only bytes can.
ASCII = "def main(argv):\n    return [name for name in argv if name]\n"
ODD = "naïve 漢字 🙂\t\x00 ½ x"


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    texts = [text[:20_000] for text in stdlib_texts("argparse.py", "ast.py")]
    backends = {
        "byte_level": train_byte_level(700, texts),
        "unigram": train_unigram(900, texts),
        "byte_fallback": train_byte_fallback(900, texts),
    }
    return {kind: save_model(folder / kind, backend) for kind, backend in backends.items()}


def load(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def mapped(draft: Path, target: Path = DEMO_TARGET) -> VocabularyMap:
    found = map_vocabulary(str(draft), str(target))
    assert found is not None
    return found


def text_of(backend: tokenizers.Tokenizer, token_ids: list[int]) -> str:
    """Their text, as it stands behind a letter: at the beginning of a text some decoders drop a space."""
    first = backend.token_to_id("a")
    return str(backend.decode([first, *token_ids], skip_special_tokens=False)).removeprefix("a")


def texts_by_decoding(backend: tokenizers.Tokenizer) -> dict[str, set[int]]:
    """Text -> ids, of tokens that are whole characters and not special."""
    special = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    found: dict[str, set[int]] = {}
    for token_id in set(backend.get_vocab().values()) - special:
        text = text_of(backend, [token_id])
        if "\ufffd" not in text:
            found.setdefault(text, set()).add(token_id)
    return found


def session_of(token_ids: list[int]) -> DraftSession:
    spec = SessionSpec("s", 1, tuple(token_ids), (), SamplingParams(temperature=0.0), SpeculationMode.EXACT, 0)
    return DraftSession(spec, list(token_ids), lambda _reply: None)


def draft_ids(vocabulary: VocabularyMap, token_ids: list[int]) -> list[int]:
    found = DraftIds(vocabulary)
    found.follow(session_of(token_ids))
    return found.ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_is_demo", [False, True])
def test_shared_tokens_are_those_of_the_same_text(drafts: dict[str, Path], kind: str, draft_is_demo: bool) -> None:
    folders = (DEMO_TARGET, drafts[kind]) if draft_is_demo else (drafts[kind], DEMO_TARGET)
    vocabulary = mapped(*folders)
    backends = [load(folder) for folder in folders]
    draft, target = (texts_by_decoding(backend) for backend in backends)
    common = draft.keys() & target.keys()
    assert len(common) > 100
    twins: dict[int, int] = {}
    for text in common:
        shared = {token_id: twin for token_id in target[text] if (twin := vocabulary.twin(token_id)) is not None}
        assert len(shared) == 1, (text, "one token of the target for each text")
        twins |= shared
        assert set(shared.values()) <= draft[text]
        # Of A and <0x41> the one that a text is made of.
        for backend, known, chosen in zip(backends, (draft, target), (shared.values(), shared), strict=True):
            is_byte = {token_id: backend.id_to_token(token_id).startswith("<0x") for token_id in known[text]}
            assert all(is_byte.values()) or not any(is_byte[token_id] for token_id in chosen)
    for text in target.keys() - common:
        assert all(vocabulary.twin(token_id) is None for token_id in target[text]), text
    assert len(set(twins.values())) == len(twins)


@pytest.mark.parametrize("kind", KINDS)
def test_committed_text_reads_the_same_to_the_draft(drafts: dict[str, Path], kind: str) -> None:
    vocabulary, draft, target = mapped(drafts[kind]), load(drafts[kind]), load(DEMO_TARGET)
    texts = [ASCII, *(() if kind == "unigram" else (ODD, stdlib_texts("csv.py")[0][:3000]))]
    for text in texts:
        token_ids = target.encode(text).ids
        assert any(vocabulary.twin(token_id) is None for token_id in token_ids) or kind == "byte_level"
        ids = draft_ids(vocabulary, token_ids)
        begins_with_bos = kind != "byte_level"
        assert (ids[0] == draft.token_to_id("<s>")) == begins_with_bos
        assert text_of(draft, ids[begins_with_bos:]) == text


def test_what_the_draft_cannot_write_is_left_out(drafts: dict[str, Path]) -> None:
    vocabulary, draft, target = mapped(drafts["unigram"]), load(drafts["unigram"]), load(DEMO_TARGET)
    ids = draft_ids(vocabulary, target.encode("for 漢 in").ids)
    assert text_of(draft, ids[1:]) == "for  in"


def test_eos_is_eos_and_names_are_no_text(drafts: dict[str, Path], tmp_path: Path) -> None:
    """The demo ends with <|endoftext|> or <|end|>, the drafts with </s>; a renamed demo has both under other names."""
    target = load(DEMO_TARGET)
    endoftext, end, user = (target.token_to_id(f"<|{name}|>") for name in ("endoftext", "end", "user"))
    for folder in drafts.values():
        draft, vocabulary = load(folder), mapped(folder)
        assert vocabulary.twin(endoftext) == draft.token_to_id("</s>")
        assert (vocabulary.twin(end), vocabulary.spell(end)) == (None, (draft.token_to_id("</s>"),))
        # A chat mark that the draft has not is read as text; text that is written like one of its marks is no mark.
        assert vocabulary.twin(user) is None
        spelled = draft_ids(vocabulary, target.encode("a <s></s>").ids)
        assert not {draft.token_to_id("</s>"), draft.token_to_id("<s>")} & set(spelled[1:])
    draft = load(drafts["byte_level"])
    assert text_of(draft, list(mapped(drafts["byte_level"]).spell(user))) == "<|user|>"
    renamed = renamed_demo_draft(tmp_path / "renamed", num_merges=3_000)
    draft, vocabulary = load(renamed), mapped(renamed)
    assert vocabulary.twin(endoftext) == draft.token_to_id("<<endoftext>>")
    assert vocabulary.twin(end) == draft.token_to_id("<<end>>")


def test_special_tokens_match_by_name(drafts: dict[str, Path]) -> None:
    vocabulary = mapped(drafts["unigram"], drafts["byte_level"])
    draft, target = load(drafts["unigram"]), load(drafts["byte_level"])
    for name in ("<unk>", "<s>", "</s>"):
        assert vocabulary.twin(target.token_to_id(name)) == draft.token_to_id(name)
    with_bos = [target.token_to_id("<s>"), *target.encode(ASCII).ids]
    assert draft_ids(vocabulary, with_bos)[:2].count(draft.token_to_id("<s>")) == 1


def test_logits_go_to_the_targets_ids(drafts: dict[str, Path]) -> None:
    vocabulary = mapped(drafts["byte_level"])
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(1))
    rows = np.stack(vocabulary.rows(logits))
    assert rows.shape == (3, 4096)
    assert rows.dtype == np.float32
    for token_id in range(4096):
        twin = vocabulary.twin(token_id)
        expected = np.full(3, -np.inf) if twin is None else logits[:, twin].numpy()
        assert (rows[:, token_id] == expected).all()
    assert np.isfinite(rows[0]).sum() == vocabulary.num_shared


@pytest.mark.parametrize("kind", KINDS)
def test_following_a_session_step_by_step_ends_where_a_fresh_look_does(drafts: dict[str, Path], kind: str) -> None:
    vocabulary, rng = mapped(drafts[kind]), random.Random(3)
    token_ids = load(DEMO_TARGET).encode(ODD + stdlib_texts("csv.py")[0][:4000]).ids
    session, found = session_of(token_ids[:7]), DraftIds(vocabulary)
    before: list[int] = []
    for _ in range(60):
        for _ in range(rng.choice([0, 1, 1, 3])):
            base_len = max(0, session.committed_len - rng.choice([0, 0, 0, 1, 5]))
            start = rng.randrange(len(token_ids) - 4)
            session.report(DraftStep(1, base_len, tuple(token_ids[start : start + rng.randrange(5)]), 1))
        unchanged_len = found.follow(session)
        assert found.ids[:unchanged_len] == before[:unchanged_len]
        assert found.ids == draft_ids(vocabulary, session.token_ids)
        before = list(found.ids)
    assert len(before) > 20


def test_the_same_vocabulary_needs_no_map(tmp_path: Path) -> None:
    assert map_vocabulary(str(DEMO_DRAFT), str(DEMO_TARGET)) is None
    content = json.loads((DEMO_TARGET / "tokenizer.json").read_text())
    content["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content, indent=4))
    (tmp_path / "config.json").write_bytes((DEMO_TARGET / "config.json").read_bytes())
    assert map_vocabulary(str(tmp_path), str(DEMO_TARGET)) is None
    (tmp_path / "tokenizer.json").unlink()  # nothing to compare, and as many ids
    assert map_vocabulary(str(tmp_path), str(DEMO_TARGET)) is None


def test_padding_rows_are_nobodys_token(tmp_path: Path) -> None:
    """As Qwen2.5's 151,936 and 152,064 rows over one tokenizer."""
    content = json.loads((DEMO_TARGET / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"vocab_size": 4224}))
    (tmp_path / "tokenizer.json").write_bytes((DEMO_TARGET / "tokenizer.json").read_bytes())
    for folders in ((tmp_path, DEMO_TARGET), (DEMO_TARGET, tmp_path)):
        vocabulary = mapped(*folders)
        assert [vocabulary.twin(token_id) for token_id in range(4224)] == [*range(4096), *[None] * 128]
    assert vocabulary.spell(4100) == ()


@pytest.mark.parametrize(
    ("num_shared", "num_tokens", "fewest"), [(19, 400, 20), (20, 400, 20), (999, 30_000, 1000), (1000, 30_000, 1000)]
)
def test_too_little_in_common_is_refused_with_both_figures(
    tmp_path: Path, num_shared: int, num_tokens: int, fewest: int
) -> None:
    """5 % of a small vocabulary, 1,000 tokens of a large one."""
    demo = load(DEMO_TARGET)
    letters = [token for token in demo.get_vocab() if token.isalpha() and token.isascii()]
    common = [token for token in letters if len(token) > 1][:num_shared]
    foreign = [f"{chr(0x3400 + place)}{chr(0x3401 + place)}" for place in range(num_tokens - num_shared)]
    # Letters are shared too, and do not count: they take the places of the last foreign tokens.
    letters = [token for token in letters if len(token) == 1][:10]
    vocab = {token: token_id for token_id, token in enumerate([*common, *foreign[: -len(letters)], *letters])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=foreign[0]))
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    content = json.loads((DEMO_DRAFT / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"vocab_size": num_tokens}))
    if num_shared >= fewest:
        assert mapped(tmp_path).num_shared_words == num_shared
        return
    message = (
        rf"shares {num_shared} of its {num_tokens} tokens, single bytes aside, with the 4091 .*; at least {fewest} are"
    )
    with pytest.raises(CheckpointRefused, match=message):
        map_vocabulary(str(tmp_path), str(DEMO_TARGET))


def test_what_cannot_be_compared_is_refused(drafts: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    save_model(folder, load(drafts["byte_level"]))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointRefused, match=re.escape("tokenizer.json")):
        map_vocabulary(str(folder), str(DEMO_TARGET))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointRefused, match=r"no tokenizer.json, and the draft model has 700 .* has 4096"):
        map_vocabulary(str(folder), str(DEMO_TARGET))
    wordpiece = load(drafts["byte_level"])
    wordpiece.decoder = tokenizers.decoders.WordPiece()
    wordpiece.save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointRefused, match=r"no bytes of their own .decoder WordPiece"):
        map_vocabulary(str(folder), str(DEMO_TARGET))
