"""A draft model with another tokenizer: proposals against transformers, exact mode's outputs against plain runs.

The oracle runs the draft model by transformers on its own ids and looks at the tokens that the target has too; which
those are, and how a text is spelled, is tested beside this (test_vocabulary_map).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from outrider.drafter_service.config import DrafterConfig
from outrider.drafting.methods.growing import GrowingMethod
from outrider.drafting.methods.registry import build_methods
from outrider.drafting.session import DraftSession
from outrider.drafting.vocabulary.mapping import DraftIds, VocabularyMap, map_vocabulary
from outrider.shared.errors import ConfigError
from outrider.shared.messages import DraftStep, SessionSpec
from outrider.shared.sampling_params import Grammar, GrammarKind, SamplingParams, SpeculationMode, stream_key
from tests.drafting.other_vocabularies import (
    DEMO_TARGET,
    renamed_demo_draft,
    save_model,
    stdlib_texts,
    train_byte_fallback,
    train_byte_level,
    train_unigram,
)
from tests.grid.driver import Driver, Session
from tests.grid.models import GridModel
from tests.grid.pools import ROOMY_BLOCKS, Pools
from tests.grid.requests import prompt_heads

GREEDY = SamplingParams(temperature=0.0)
MAX_LEN = 256
KINDS = ("renamed", "byte_level", "unigram", "byte_fallback")
NUM_TOKENS = 48
SETTINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.8, seed=5),
    "penalties": SamplingParams(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.4, top_p=0.9, seed=6),
    "grammar": SamplingParams(temperature=0.0, grammar=Grammar(GrammarKind.REGEX, r"([a-z]{1,9} = [0-9]{1,4}\\n){40}")),
}


@dataclass(frozen=True)
class Draft:
    """The method as the drafter serves it, and what the oracle needs."""

    method: GrowingMethod
    vocabulary: VocabularyMap
    oracle: Any


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Draft]:
    folder = tmp_path_factory.mktemp("mapped")
    texts = [stdlib_texts("argparse.py")[0][:30_000]]
    renamed_demo_draft(folder / "renamed", num_merges=2_000)
    save_model(folder / "byte_level", train_byte_level(600, texts), seed=1, max_position_embeddings=MAX_LEN)
    save_model(folder / "unigram", train_unigram(400, texts), seed=2)
    save_model(folder / "byte_fallback", train_byte_fallback(800, texts), seed=3)
    return {kind: _serve(folder / kind) for kind in KINDS}


def _serve(folder: Path) -> Draft:
    config = DrafterConfig(
        draft_model=(str(folder),), target_model=str(DEMO_TARGET), methods=("draft_model",), dtype="float32",
        kv_cache_mb=16, num_threads=1, prefill_chunk_size=32, block_size=8,
    )  # fmt: skip
    said: list[str] = []
    method = build_methods(config, said.append)["draft_model"]
    vocabulary = map_vocabulary(str(folder), str(DEMO_TARGET))
    assert isinstance(method, GrowingMethod)
    assert vocabulary is not None
    assert any(f"shares {vocabulary.num_shared} tokens" in line for line in said)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Draft(method, vocabulary, model)


def prompts() -> list[tuple[int, ...]]:
    return list(prompt_heads(DEMO_TARGET).values())


def open_session(draft: Draft, prompt: tuple[int, ...], params: SamplingParams = GREEDY) -> DraftSession:
    spec = SessionSpec("s", 1, prompt, (), params, SpeculationMode.EXACT, 7, method="draft_model")
    session = DraftSession(spec, list(prompt), lambda _reply: None)
    draft.method.open(session)
    return session


def ask(draft: Draft, session: DraftSession, base_len: int, tokens: list[int], count: int, nodes: int = 0) -> list[int]:
    session.report(DraftStep(1, base_len, tuple(tokens), count, max_tree_nodes=nodes))
    while draft.method.advance(session):
        pass
    (proposal,) = draft.method.propose([session])
    if not proposal.parents:
        return list(proposal.token_ids)
    best: list[int] = []  # the first child of each node, from the root down
    place = -1
    while place in proposal.parents:
        place = proposal.parents.index(place)
        best.append(proposal.token_ids[place])
    return best


@torch.inference_mode()
def continuation(draft: Draft, token_ids: list[int], count: int) -> list[int]:
    """The draft's greedy choice among the shared tokens, `count` times, each time from its ids of the whole text."""
    spec = SessionSpec("o", 1, tuple(token_ids), (), GREEDY, SpeculationMode.EXACT, 0)
    ids = DraftIds(draft.vocabulary)
    ids.follow(DraftSession(spec, list(token_ids), lambda _reply: None))
    own, found = list(ids.ids), []
    shared = [token for token in range(4096) if draft.vocabulary.twin(token) is not None]
    twins = [draft.vocabulary.spell(token)[0] for token in shared]
    for _ in range(count):
        best = int(draft.oracle(torch.tensor([own])).logits[0, -1][twins].argmax())
        own.append(twins[best])
        found.append(shared[best])
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [0, 6])
def test_greedy_drafts_are_those_of_transformers(drafts: dict[str, Draft], kind: str, nodes: int) -> None:
    """Through commits of any tokens of the target, shared or not, that agree, contradict and take back."""
    draft, rng = drafts[kind], random.Random(kind)
    for prompt in prompts()[nodes // 6 :: 6]:
        session = open_session(draft, prompt)
        output: list[int] = []
        proposed = ask(draft, session, 0, [], 4, nodes)
        assert proposed == continuation(draft, list(prompt), len(proposed))
        for _ in range(8):
            accepted = proposed[: rng.randint(0, len(proposed))]
            new = [*accepted, *(rng.randrange(4096) for _ in range(rng.choice([0, 1, 1, 3])))]
            base_len = len(output) - rng.choice([0, 0, min(3, len(output))])
            output = [*output[:base_len], *new]
            proposed = ask(draft, session, base_len, new, rng.randint(1, 5), nodes)
            assert proposed
            assert proposed == continuation(draft, [*prompt, *output], len(proposed))
        draft.method.close(session)


def test_what_it_says_of_itself_is_the_targets(drafts: dict[str, Draft]) -> None:
    for draft in drafts.values():
        assert draft.method.info.vocab_size == 4096


def test_drafts_end_where_the_draft_models_own_context_ends(drafts: dict[str, Draft]) -> None:
    """Counted in its own tokens, of which there are more than of the target's."""
    draft = drafts["byte_level"]
    prompt = prompts()[0]
    session = open_session(draft, prompt)
    committed: list[int] = []
    lengths = set()
    for _ in range(MAX_LEN):
        new = [int(draft.method.info.vocab_size or 0) - 1 - len(committed) % 50]
        proposed = ask(draft, session, len(committed), new, 6)
        committed += new
        ids = DraftIds(draft.vocabulary)
        spec = SessionSpec("o", 1, (*prompt, *committed), (), GREEDY, SpeculationMode.EXACT, 0)
        ids.follow(DraftSession(spec, [*prompt, *committed], lambda _reply: None))
        room = MAX_LEN - len(ids.ids)
        assert len(proposed) == max(0, min(6, room))
        lengths.add(len(proposed))
        if room < -20:
            break
    assert 0 in lengths
    assert 6 in lengths
    assert len(prompt) + len(committed) < MAX_LEN
    draft.method.close(session)


def test_where_nothing_shared_is_allowed_nothing_is_guessed(drafts: dict[str, Draft]) -> None:
    draft = drafts["unigram"]
    unshared = tuple(token for token in range(5, 4096) if draft.vocabulary.twin(token) is None)[:3]
    params = SamplingParams(temperature=1.0, allowed_token_ids=unshared, ignore_eos=True, seed=1)
    session = open_session(draft, prompts()[0], params)
    for nodes in (0, 6):
        assert ask(draft, session, 0, [], 5, nodes) == []
    draft.method.close(session)


def test_a_vocabulary_of_no_use_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "draft", train_byte_level(600, stdlib_texts("csv.py")))
    (folder / "tokenizer.json").unlink()
    config = DrafterConfig(draft_model=(str(folder),), target_model=str(DEMO_TARGET), methods=("draft_model",))
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        build_methods(config, said.append)
    assert said == []


# ---- exact mode -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    opened = Pools(GridModel(DEMO_TARGET, DEMO_TARGET.parent / "demo-draft", "float32"), num_threads=1)
    yield opened
    opened.close()


def session(name: str, prompt: tuple[int, ...], params: SamplingParams, draft: Draft | None, tree: bool) -> Session:
    params = replace(params, max_tokens=NUM_TOKENS, ignore_eos=True)
    key = stream_key(params.seed or 0, prompt, 0)
    spec = SessionSpec(name, 0, prompt, (), params, SpeculationMode.EXACT, key, cache_salt=name)
    return Session(spec, draft.method if draft else None, gamma=4, free_run=NUM_TOKENS if not draft else 1, tree=tree)


@pytest.mark.parametrize(
    "setting",
    ["greedy", *(pytest.param(name, marks=pytest.mark.storm) for name in ("seeded", "penalties")), "grammar"],
)
def test_exact_outputs_are_those_without_drafts(pools: Pools, drafts: dict[str, Draft], setting: str) -> None:
    driver, params = Driver(pools.pool("whole", ROOMY_BLOCKS)), SETTINGS[setting]
    prompt = prompts()[list(SETTINGS).index(setting)]
    plain = session("plain", prompt, params, None, False)
    driver.run([plain])
    assert not plain.failure
    assert len(plain.output) == NUM_TOKENS
    for tree in (False, True):
        sessions = {kind: session(f"{kind}-{tree}", prompt, params, drafts[kind], tree) for kind in KINDS}
        driver.run(list(sessions.values()))
        for kind, drafted in sessions.items():
            assert not drafted.failure
            assert drafted.output == plain.output, (kind, tree)
            assert drafted.num_draft_tokens >= NUM_TOKENS / 5
        # The one that knows the text is right more often than not at all; the random ones are only there to be wrong.
        assert sessions["renamed"].num_accepted_tokens >= NUM_TOKENS / 8
