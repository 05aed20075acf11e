"""All pairs of the fields that decide which tokens may come: no error after the first token, the same with any draft.

The oracle of a grammar is Python's own: `re`, `json`, a set of strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from outrider.engine.certificate import certify
from outrider.engine.model.load import load_model
from outrider.engine.run.runner import ModelRunner
from outrider.shared.errors import NoTokenPermitted
from outrider.shared.messages import Commit, FinishReason
from outrider.shared.sampling_params import Grammar, GrammarKind, SamplingParams, SpeculationMode
from outrider.verifier_service.engine import VerifierEngine
from tests.verifier_service.drafts import oracle_draft, random_draft, tree_draft
from tests.verifier_service.engine_client import (
    EOS_ID,
    VOCAB_SIZE,
    EngineShape,
    Session,
    finish_of,
    generate,
    make_spec,
    running_engine,
    save_llama,
    tokens_of,
)

TEXTS = ["<pad>", "<bos>", "<eos>", *"abcdefghijklmnopqrstuvwxyz0123456789", *'{}[]":,-+.', "ab", '":', "a1"]
TEXTS += "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: VOCAB_SIZE - len(TEXTS)]
IDS = {text: token_id for token_id, text in enumerate(TEXTS)}
A, B, AB = IDS["a"], IDS["b"], IDS["ab"]
PROMPT = (A, B, IDS["c"], IDS["1"])
MAX_TOKENS = 12

FIELDS: dict[str, tuple[Any, ...]] = {
    "grammar": (
        Grammar(GrammarKind.REGEX, "[ab]{3,8}"),
        Grammar(GrammarKind.CHOICE, '["ab", "abba", "b"]'),
        Grammar(GrammarKind.LARK, 'start: "a" ("b" | "a1")* "c"?'),
        Grammar(
            GrammarKind.JSON_SCHEMA,
            '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], '
            '"additionalProperties": false}',
        ),
    ),
    "ignore_eos": (True,),
    "min_tokens": (6,),
    "bad_words": (((A,), (AB,)), ((A, B), (B, B))),
    "allowed_token_ids": ((A, B), (B, IDS["c"], EOS_ID)),
    "stop_token_ids": ((B,), (EOS_ID,)),
    "logit_bias": (((EOS_ID, 100.0),), ((A, 100.0), (B, -100.0))),
}
PAIRS = [
    {first: one, second: other}
    for first, second in combinations(FIELDS, 2)
    for one, other in product(FIELDS[first], FIELDS[second])
]


def matches(grammar: Grammar, text: str) -> bool:
    if grammar.kind is GrammarKind.CHOICE:
        return text in json.loads(grammar.text)
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        parsed = json.loads(text)
        return set(parsed) == {"a"} and isinstance(parsed["a"], int)
    pattern = grammar.text if grammar.kind is GrammarKind.REGEX else "a(b|a1)*c?"
    return re.fullmatch(pattern, text) is not None


@pytest.fixture(scope="module")
def grammar_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerifierEngine]:
    """A tiny model with a tokenizer of single characters and a few pairs."""
    folder = save_llama(tmp_path_factory.mktemp("grammars"), seed=5)
    backend = tokenizers.Tokenizer(models.BPE(vocab=IDS, merges=[("a", "b"), ('"', ":"), ("a", "1")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(TEXTS[:3])
    backend.save(str(Path(folder) / "tokenizer.json"))
    loaded = load_model(str(folder), dtype="float32")
    certificate = certify(loaded, ModelRunner(loaded, loaded.make_cache(64, 4)))
    with running_engine(loaded, certificate, EngineShape(rejection_sample_method="block")) as engine:
        yield engine


def is_refused(engine: VerifierEngine, params: SamplingParams) -> bool:
    """Whether `open` refuses it, before anything is said."""
    try:
        with Session(engine, make_spec(PROMPT, params)):
            return False
    except NoTokenPermitted:
        return True


def outcomes(engine: VerifierEngine, params: SamplingParams) -> list[Commit]:
    """Plain decoding; raises if any draft makes a difference in exact mode."""
    plain = generate(engine, make_spec(PROMPT, params))
    right = tokens_of(plain)
    drafts = [*(oracle_draft([*right, A, B, AB, EOS_ID, A], length) for length in (1, 2, 5)), tree_draft(right, 3)]
    for draft in [*drafts, random_draft(4)]:
        drafted = generate(engine, make_spec(PROMPT, params), draft)
        assert (tokens_of(drafted), finish_of(drafted)) == (right, finish_of(plain))
    return plain


def check_ending(params: SamplingParams, commits: list[Commit]) -> None:
    token_ids, (reason, stop_token_id) = tokens_of(commits), finish_of(commits)
    text = "".join(TEXTS[token_id] for token_id in token_ids if token_id != EOS_ID)
    if reason is FinishReason.LENGTH:
        assert len(token_ids) == params.max_tokens
    elif reason is FinishReason.STOP and stop_token_id is None:
        assert token_ids[-1] == EOS_ID
        if params.grammar is not None:
            assert matches(params.grammar, text)
        else:
            assert not params.ignore_eos
    elif reason is FinishReason.STOP:
        assert token_ids[-1] == stop_token_id in params.stop_token_ids
    else:
        assert reason is FinishReason.ABORT
        assert params.allowed_token_ids or params.bad_words


@pytest.mark.parametrize("fields", PAIRS, ids=lambda fields: "+".join(fields))
def test_pairs(grammar_engine: VerifierEngine, fields: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, **fields)
    if is_refused(grammar_engine, params):
        assert {"grammar", "allowed_token_ids", "bad_words"} & fields.keys()
    else:
        check_ending(params, outcomes(grammar_engine, params))


@pytest.mark.storm
@pytest.mark.parametrize("fields", PAIRS, ids=lambda fields: "+".join(fields))
def test_pairs_sampled(grammar_engine: VerifierEngine, fields: dict[str, Any]) -> None:
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=MAX_TOKENS, **fields)
    if is_refused(grammar_engine, params):
        return
    commits = outcomes(grammar_engine, params)
    check_ending(params, commits)
    spec = make_spec(PROMPT, replace(params, seed=None), SpeculationMode.REJECTION)
    for draft in (None, oracle_draft([*tokens_of(commits), A, B, EOS_ID, A], 5), random_draft(4)):
        check_ending(params, generate(grammar_engine, spec, draft))


AB_CHOICE = Grammar(GrammarKind.CHOICE, '["ab", "abba"]')
JUST_AB, JUST_ABC, MANY_A = (Grammar(GrammarKind.LARK, f"start: {rule}") for rule in ('"ab"', '"abc"', "/a+/"))


@pytest.mark.parametrize(
    ("fields", "text", "finish"),
    [
        # The grammar is complete: an end, whatever else the fields say.
        ({"grammar": JUST_AB, "ignore_eos": True}, "ab", (FinishReason.STOP, None)),
        ({"grammar": JUST_AB, "min_tokens": 9}, "ab", (FinishReason.STOP, None)),
        ({"grammar": JUST_AB, "allowed_token_ids": (A, B)}, "ab", (FinishReason.STOP, None)),
        ({"grammar": JUST_AB, "bad_words": ((EOS_ID,),)}, "ab", (FinishReason.STOP, None)),
        # It may end or go on: with ignore_eos it goes on.
        ({"grammar": MANY_A, "ignore_eos": True}, "a" * 12, (FinishReason.LENGTH, None)),
        ({"grammar": AB_CHOICE, "ignore_eos": True, "bad_words": ((AB,),)}, "abba", (FinishReason.STOP, None)),
        (
            {"grammar": MANY_A, "ignore_eos": True, "stop_token_ids": (EOS_ID,)},
            "a",
            (FinishReason.STOP, EOS_ID),
        ),
        # A dead end.
        (
            {"grammar": JUST_ABC, "bad_words": ((B, IDS["c"]),)},
            "ab",
            (FinishReason.ABORT, None),
        ),
        ({"allowed_token_ids": (A, B), "bad_words": ((A, A), (A, B))}, "a", (FinishReason.ABORT, None)),
    ],
    ids=str,
)
def test_endings(
    grammar_engine: VerifierEngine, fields: dict[str, Any], text: str, finish: tuple[FinishReason, int | None]
) -> None:
    """Biased towards a, ab last, and the end of the sequence wherever it may come."""
    biases = ((EOS_ID, 90.0), (A, 80.0), (B, 70.0), (AB, 60.0))
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logit_bias=biases, **fields)
    commits = outcomes(grammar_engine, params)
    assert "".join(TEXTS[token_id] for token_id in tokens_of(commits) if token_id != EOS_ID) == text
    assert finish_of(commits) == finish


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"grammar": AB_CHOICE, "allowed_token_ids": (IDS["c"],)}, "grammar, allowed_token_ids"),
        ({"grammar": AB_CHOICE, "bad_words": ((A,), (AB,))}, "grammar, bad_words"),
        ({"allowed_token_ids": (A,), "bad_words": ((A,),)}, "allowed_token_ids, bad_words"),
        ({"bad_words": tuple((token_id,) for token_id in range(VOCAB_SIZE))}, "bad_words"),
    ],
)
def test_what_could_not_begin_is_refused_at_the_door(
    grammar_engine: VerifierEngine, fields: dict[str, Any], named: str
) -> None:
    spec = make_spec(PROMPT, SamplingParams(temperature=0.0, **fields))
    session = Session(grammar_engine, spec)
    with pytest.raises(NoTokenPermitted, match=f"^{named} leave no token$"):
        session.__enter__()
