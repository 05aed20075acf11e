"""Draft models with recurrent layers: whatever was accepted, a proposal is that of a session that begins with the text.

Slots that hold nothing are NaN, so that a state that is read without having been written leaves no draft at all.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from outrider.drafting.methods.draft_model import CATCH_UP_ROWS, DraftModelNet, draft_model_method
from outrider.drafting.methods.draft_states import DraftStates
from outrider.drafting.methods.growing import GrowingMethod
from outrider.drafting.session import DraftSession
from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from outrider.shared.messages import DraftStep, Proposal, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from tests.engine.tiny_models import HYBRIDS, save_tiny_model
from tests.verifier_service.engine_client import VOCAB_SIZE, PoisonedSlots, save_hybrid

GREEDY = (SamplingParams(temperature=0.0), SpeculationMode.EXACT)
RACED = (SamplingParams(temperature=0.8, top_p=0.95), SpeculationMode.EXACT)
DRAWN = (SamplingParams(temperature=0.9), SpeculationMode.REJECTION)
LAWS = {"greedy": GREEDY, "raced": RACED, "drawn": DRAWN}
MOST_DRAFT_TOKENS = 5
# One per kind of recurrence; the other families share its kernel.
KINDS = ("bamba", "jamba", "lfm2")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(str(checkpoint), dtype="float32")


@dataclass
class Drafter:
    """A method with blocks and slots of its own, and the rows of its forwards."""

    loaded: LoadedModel
    num_blocks: int = 150
    num_slots: int = 30
    num_log_rows: int = 33
    block_size: int = 4
    blocks: BlockManager = field(init=False)
    states: DraftStates = field(init=False)
    method: GrowingMethod = field(init=False)
    num_rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = BlockManager(self.num_blocks, self.block_size)
        states = self.loaded.make_states(self.num_slots, self.num_log_rows)
        runner = ModelRunner(self.loaded, self.loaded.make_cache(self.num_blocks, self.block_size), states)
        net = DraftModelNet(runner, self.blocks, prefill_chunk_size=30)
        assert states is not None
        assert net._caches.recurrent is not None
        self.states = net._caches.recurrent
        self.states.table._free = PoisonedSlots(states, self.states.table._free)
        self.method = draft_model_method(net, "tiny")
        forward = runner.forward

        def counted(batch: Any) -> Any:
            self.num_rows.append(len(batch.token_ids))
            return forward(batch)

        runner.forward = counted  # type: ignore[method-assign, assignment]

    def open(
        self,
        prompt: Sequence[int],
        committed: Sequence[int] = (),
        law: tuple[SamplingParams, SpeculationMode] = GREEDY,
        key: int = 7,
    ) -> DraftSession:
        spec = SessionSpec("s", 1, tuple(prompt), tuple(committed), *law, key, method="draft_model")
        session = DraftSession(spec, [*prompt, *committed], lambda _reply: None)
        self.method.open(session)
        while self.method.advance(session):
            pass
        return session

    def propose(self, *asks: tuple[DraftSession, int, Sequence[int], int, int]) -> list[Proposal]:
        """(session, base_len, committed tokens, draft length, tree nodes) each, in one batch."""
        self.num_rows.clear()
        for session, base_len, tokens, count, nodes in asks:
            session.report(DraftStep(1, base_len, tuple(tokens), count, max_tree_nodes=nodes))
        proposals = self.method.propose([session for session, *_ in asks])
        self.check_integrity()
        return proposals

    def check_integrity(self) -> None:
        self.blocks.check_integrity()
        self.states.table.check_integrity()

    def close(self, *sessions: DraftSession) -> None:
        """All that there are; nothing may be left."""
        for session in sessions:
            self.method.close(session)
        self.check_integrity()
        assert self.blocks.num_free_blocks == self.num_blocks
        assert self.states.table.num_free_slots == self.num_slots


def fresh(loaded: LoadedModel, session: DraftSession, count: int, nodes: int) -> Proposal:
    """What a drafter proposes that is new to the text."""
    drafter, spec = Drafter(loaded), session.spec
    law = (spec.sampling_params, spec.mode)
    opened = drafter.open(spec.prompt_token_ids, session.output_token_ids, law, spec.stream_key)
    return drafter.propose((opened, session.committed_len, (), count, nodes))[0]


def prompt_of(seed: int, length: int = 21) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def paths(proposal: Proposal) -> list[list[int]]:
    """Of a tree or a chain, the tokens from the root to each node."""
    found: list[list[int]] = []
    for place, token_id in enumerate(proposal.token_ids):
        parent = proposal.parents[place] if proposal.parents else place - 1
        found.append([*(found[parent] if parent >= 0 else []), token_id])
    return found


def check_every_acceptance(loaded: LoadedModel, law: str, nodes: int, counts: Sequence[int]) -> None:
    drafter, vocab_size = Drafter(loaded), loaded.vocab_size
    session = drafter.open([token % vocab_size for token in prompt_of(3, loaded.max_model_len // 3)], law=LAWS[law])
    (proposal,) = drafter.propose((session, 0, (), MOST_DRAFT_TOKENS, nodes))
    assert proposal == fresh(loaded, session, MOST_DRAFT_TOKENS, nodes)
    for count, accepted in itertools.product(counts, range(MOST_DRAFT_TOKENS + 1)):
        longest = [path for path in paths(proposal) if len(path) <= accepted] or [[]]
        news = [*longest[-1], (7 * count + accepted) % vocab_size]
        (proposal,) = drafter.propose((session, session.committed_len, news, count, nodes))
        assert len(proposal.token_ids) >= count
        assert proposal == fresh(loaded, session, count, nodes), (count, accepted)
    drafter.close(session)


@pytest.mark.parametrize("nodes", [0, 12])
@pytest.mark.parametrize("law", LAWS)
def test_every_acceptance_leaves_a_fresh_sessions_drafts(loaded: LoadedModel, law: str, nodes: int) -> None:
    check_every_acceptance(loaded, law, nodes, range(1, MOST_DRAFT_TOKENS + 1) if law == "greedy" else (2, 4))


@pytest.mark.parametrize(
    "kind", [kind if kind in KINDS else pytest.param(kind, marks=pytest.mark.storm) for kind in HYBRIDS]
)
def test_so_do_those_of_other_recurrences(kind: str, tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny_model(*HYBRIDS[kind], tmp_path)), dtype="float32")
    for nodes in (0, 12):
        check_every_acceptance(loaded, "greedy", nodes, (3,))


def test_greedy_drafts_are_those_of_transformers(loaded: LoadedModel, checkpoint: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    drafter, rng = Drafter(loaded), random.Random(4)
    session, draft = drafter.open(prompt_of(1)), ()
    for _ in range(8):
        news = [*draft[: rng.randint(0, 4)], rng.randrange(VOCAB_SIZE)]
        draft = drafter.propose((session, session.committed_len, news, 4, 0))[0].token_ids
        ids = torch.tensor([session.token_ids])
        with torch.inference_mode():
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4)
        assert list(draft) == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("nodes", [0, 12])
def test_sessions_in_company_that_take_back_ask_again_and_change_their_drafts(loaded: LoadedModel, nodes: int) -> None:
    """Chains and trees in one batch; slots for all of them, so that nobody goes without a draft."""
    drafter, rng = Drafter(loaded, num_blocks=400), random.Random(nodes)
    laws = [*LAWS.values(), GREEDY]
    sessions = [drafter.open(prompt_of(key, 9 + 30 * key), law=laws[key], key=key) for key in range(4)]
    drafts: list[Sequence[int]] = [()] * 4
    for _ in range(8):
        asks = []
        for place in rng.sample(range(4), rng.randint(1, 4)):
            session, count = sessions[place], rng.randint(1, MOST_DRAFT_TOKENS)
            kind = rng.choice(["news", "news", "again", "back"])
            back = min(session.committed_len, rng.randint(1, 9)) if kind == "back" else 0
            news = [*drafts[place][: rng.randint(0, 4)], rng.randrange(VOCAB_SIZE)] if kind == "news" else [5]
            news = news if kind != "again" or not session.committed_len else []
            asks.append((session, session.committed_len - back, news, count, nodes if place % 2 else 0))
        proposals = drafter.propose(*asks)
        for (session, _, _, count, of_tree), proposal in zip(asks, proposals, strict=True):
            assert proposal == fresh(loaded, session, count, of_tree)
            drafts[sessions.index(session)] = () if of_tree else proposal.token_ids
    drafter.close(*sessions)


# ---- what is computed again, and what is not ----


@pytest.mark.parametrize("accepted", range(MOST_DRAFT_TOKENS + 1))
def test_no_text_is_read_twice(loaded: LoadedModel, accepted: int) -> None:
    """After a rejection the new token alone; after a draft that was accepted whole its last token too. Then one token a
    forward."""
    drafter = Drafter(loaded)
    session = drafter.open(prompt_of(2))
    for _ in range(3):
        (proposal,) = drafter.propose((session, session.committed_len, (), MOST_DRAFT_TOKENS, 0))
        news = [*proposal.token_ids[:accepted], 5]
        drafter.propose((session, session.committed_len, news, MOST_DRAFT_TOKENS, 0))
        first = 2 if accepted == MOST_DRAFT_TOKENS else 1
        assert drafter.num_rows == [first] + [1] * (MOST_DRAFT_TOKENS - 1)
        drafter.propose((session, session.committed_len, (), 1, 0))
        assert drafter.num_rows == [1], "a step that is asked for again"


@pytest.mark.parametrize("accepted", range(3))
def test_a_guess_that_was_wrong_is_taken_back_without_reading_again(loaded: LoadedModel, accepted: int) -> None:
    """A drafter that is asked ahead reads its own draft and a guess as committed; at any place in a block."""
    drafter = Drafter(loaded)
    session = drafter.open(prompt_of(5))
    (proposal,) = drafter.propose((session, 0, [9], 4, 0))
    for _ in range(5):
        base_len = session.committed_len
        drafter.propose((session, base_len, [*proposal.token_ids, 11], 4, 0))
        (proposal,) = drafter.propose((session, base_len, [*proposal.token_ids[:accepted], 12], 4, 0))
        assert drafter.num_rows == [1, 1, 1, 1]
        assert proposal == fresh(loaded, session, 4, 0)
    drafter.close(session)


def test_a_prompt_that_was_read_is_not_read_again(loaded: LoadedModel) -> None:
    """For a second session, from the last block's end; nor by one that takes back its whole output."""
    drafter, prompt = Drafter(loaded), prompt_of(6, 140)
    first = drafter.open(prompt)
    drafter.propose((first, 0, (), 4, 0))
    drafter.num_rows.clear()
    second = drafter.open(prompt)
    assert drafter.num_rows == []
    assert drafter.propose((second, 0, (), 4, 0))[0] == fresh(loaded, second, 4, 0)
    assert drafter.num_rows[0] <= CATCH_UP_ROWS
    drafter.propose((first, 0, [5, 6, 7, 8, 9, 10], 4, 0), (second, 0, [3], 4, 0))
    assert drafter.propose((first, 0, [4], 4, 0))[0] == fresh(loaded, first, 4, 0)
    assert drafter.num_rows[0] <= CATCH_UP_ROWS
    drafter.close(first, second)


# ---- too little memory ----


@pytest.mark.parametrize(("num_slots", "num_blocks"), [(2, 150), (3, 150), (5, 150), (9, 150), (30, 20), (4, 20)])
def test_too_few_slots_give_fewer_drafts_but_right_ones(loaded: LoadedModel, num_slots: int, num_blocks: int) -> None:
    drafter = Drafter(loaded, num_blocks=num_blocks, num_slots=num_slots)
    sessions = [drafter.open(prompt_of(seed)) for seed in range(4)]
    num_whole, pairs = 0, itertools.islice(itertools.cycle(itertools.combinations(range(4), 2)), 12)
    for step, pair in enumerate(pairs):
        nodes = 8 * (step % 3 == 2) * (num_slots > 5)
        asks = [(sessions[place], sessions[place].committed_len, [step], 4, nodes) for place in pair]
        proposals = drafter.propose(*asks)
        assert any(proposal.token_ids for proposal in proposals), "one of them has room"
        for proposal, (session, *_) in zip(proposals, asks, strict=True):
            whole, num_tokens = fresh(loaded, session, 4, nodes), len(proposal.token_ids)
            assert num_tokens in (0, 1, len(whole.token_ids)), "two new sessions may find a state each, and no second"
            assert proposal.token_ids == whole.token_ids[:num_tokens]
            num_whole += num_tokens == len(whole.token_ids)
    assert num_whole >= 6
    drafter.close(*sessions)


@pytest.mark.parametrize("law", LAWS)
def test_a_short_log_bounds_drafts_whatever_their_tokens(loaded: LoadedModel, law: str) -> None:
    """Of a chain each token needs a row, of a tree each node above the last level."""
    drafter = Drafter(loaded, num_log_rows=9)
    session = drafter.open(prompt_of(8), law=LAWS[law])
    (chain,) = drafter.propose((session, 0, (), 16, 0))
    assert len(chain.token_ids) == 9
    assert chain == fresh(loaded, session, 9, 0)
    (tree,) = drafter.propose((session, 0, (), 16, 64))
    assert max(len(path) for path in paths(tree)) == 2
    drafter.close(session)


def test_a_forward_that_fails_leaves_the_state_whole(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Drafter(loaded)
    session = drafter.open(prompt_of(9))
    (proposal,) = drafter.propose((session, 0, (), 4, 0))
    append = drafter.states.append
    for fails_at in range(3):
        calls = iter(range(fails_at + 1))

        def failing(states: Any, calls: Iterator[int] = calls, fails_at: int = fails_at) -> None:
            if next(calls) == fails_at:
                raise RuntimeError("broken")
            append(states)

        with monkeypatch.context() as patch:
            patch.setattr(drafter.states, "append", failing)
            with pytest.raises(RuntimeError, match="broken"):
                drafter.propose((session, session.committed_len, [fails_at], 4, 0))
        (proposal,) = drafter.propose((session, session.committed_len, [8], 4, 0))
        assert proposal == fresh(loaded, session, 4, 0)
    drafter.close(session)
