"""The draft model on a real tiny Llama: its drafts are those of transformers, its laws those it samples from."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from outrider.drafting.methods.draft_model import (
    CATCH_UP_ROWS,
    MAX_DRAFT_TOKENS,
    DraftModelNet,
    draft_model_method,
)
from outrider.drafting.methods.growing import GrowingMethod
from outrider.drafting.session import DraftSession
from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from outrider.engine.sampling.coupling import coupled_sample
from outrider.engine.sampling.laws import LogitsProcessor
from outrider.shared.messages import LAW_SIZE, LAW_TOTAL, DraftStep, Proposal, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from tests.verifier_service.acceptance.toy import SMALLEST_P_VALUE, chi_square_p_value
from tests.verifier_service.engine_client import VOCAB_SIZE, save_llama

GREEDY = SamplingParams(temperature=0.0)
MAX_LEN = 200


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("draft"), seed=5, num_layers=1, max_len=MAX_LEN)


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(str(checkpoint), dtype="float32")


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt_of(seed: int, length: int = 20) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


@dataclass
class Drafter:
    """A method with its blocks, and what the engine would do with it."""

    loaded: LoadedModel
    num_blocks: int = 100
    block_size: int = 4
    prefill_chunk_size: int = 32
    blocks: BlockManager = field(init=False)
    method: GrowingMethod = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = BlockManager(self.num_blocks, self.block_size)
        runner = ModelRunner(self.loaded, self.loaded.make_cache(self.num_blocks, self.block_size))
        net = DraftModelNet(runner, self.blocks, prefill_chunk_size=self.prefill_chunk_size)
        self.method = draft_model_method(net, "tiny")

    def open(
        self,
        prompt: list[int],
        params: SamplingParams = GREEDY,
        mode: SpeculationMode = SpeculationMode.EXACT,
        *,
        committed: tuple[int, ...] = (),
        stream_key: int = 7,
    ) -> DraftSession:
        spec = SessionSpec("s", 1, tuple(prompt), committed, params, mode, stream_key, method="draft_model")
        session = DraftSession(spec, [*prompt, *committed], lambda _reply: None)
        self.method.open(session)
        while self.method.advance(session):
            pass
        return session

    def propose(self, *asks: tuple[DraftSession, int, list[int], int]) -> list[Proposal]:
        """(session, base_len, committed tokens, number of draft tokens) each; all in one batch."""
        for session, base_len, tokens, count in asks:
            session.report(DraftStep(1, base_len, tuple(tokens), count))
        proposals = self.method.propose([session for session, *_ in asks])
        self.blocks.check_integrity()
        for (session, *_), proposal in zip(asks, proposals, strict=True):
            assert proposal.base_len == session.committed_len
            params, mode = session.spec.sampling_params, session.spec.mode
            races = mode is SpeculationMode.EXACT and not params.greedy and not proposal.parents
            assert len(proposal.confidence) == (0 if races else len(proposal.token_ids))
        return proposals

    def tokens(self, session: DraftSession, base_len: int, tokens: list[int], count: int) -> list[int]:
        return list(self.propose((session, base_len, tokens, count))[0].token_ids)


@pytest.fixture
def drafter(loaded: LoadedModel) -> Drafter:
    return Drafter(loaded)


def continuation(oracle: transformers.PreTrainedModel, token_ids: list[int], count: int) -> list[int]:
    ids = torch.tensor([token_ids])
    with torch.inference_mode():  # the mask is given, else transformers hides tokens that equal its padding id
        generated = oracle.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return generated[0, len(token_ids) :].tolist()


def test_greedy_drafts_are_those_of_transformers(drafter: Drafter, oracle: transformers.PreTrainedModel) -> None:
    """Through commits that agree, contradict at once, contradict late, and take back."""
    rng = random.Random(1)
    for seed in range(3):
        prompt = prompt_of(seed, 10 + 7 * seed)
        session = drafter.open(prompt)
        output: list[int] = []
        draft = drafter.tokens(session, 0, [], 5)
        assert draft == continuation(oracle, prompt, 5)
        for _ in range(12):
            accepted = draft[: rng.randint(0, len(draft))]
            new = [*accepted, rng.randrange(VOCAB_SIZE)] if rng.random() < 0.8 else accepted
            taken_back = rng.choice([0, 0, 0, min(3, len(output))])
            base_len = len(output) - taken_back
            output = [*output[:base_len], *new]
            draft = drafter.tokens(session, base_len, new, rng.randint(1, 7))
            assert draft == continuation(oracle, prompt + output, len(draft))
            assert draft
        drafter.method.close(session)
    assert drafter.blocks.num_free_blocks == drafter.num_blocks


@pytest.mark.parametrize("mode", SpeculationMode)
def test_a_batch_of_sessions_equals_each_alone(loaded: LoadedModel, mode: SpeculationMode) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.2)
    script = [([], 5), ([3, 4], 2), ([9], 6), ([], 4), ([11, 12, 13], 3)]

    def alone(seed: int) -> list[Proposal]:
        drafter = Drafter(loaded)
        session = drafter.open(prompt_of(seed), params, mode, stream_key=seed)
        return [drafter.propose((session, session.committed_len, new, count))[0] for new, count in script]

    together = Drafter(loaded)
    sessions = [together.open(prompt_of(seed), params, mode, stream_key=seed) for seed in range(3)]
    rounds = [
        together.propose(
            *((session, session.committed_len, new, count + place) for place, session in enumerate(sessions))
        )
        for new, count in script
    ]
    for seed in range(3):
        for found, expected in zip(rounds, alone(seed), strict=True):
            count = len(expected.token_ids)
            assert found[seed].token_ids[:count] == expected.token_ids
            assert found[seed].laws[:count] == expected.laws
            assert len(found[seed].token_ids) == count + seed


def test_exact_mode_drafts_are_coupled_samples_of_the_draft_law(
    drafter: Drafter, oracle: transformers.PreTrainedModel
) -> None:
    params = SamplingParams(temperature=0.8, top_k=20, repetition_penalty=1.2)
    prompt, committed = prompt_of(3), (5, 6, 7)
    session = drafter.open(prompt, params, committed=committed, stream_key=1234)
    draft = drafter.tokens(session, 3, [], 6)
    processor = LogitsProcessor(params, prompt, ())
    output = list(committed)
    for token in draft:
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + output])).logits[0, -1].numpy()
        assert token == coupled_sample(processor.log_weights(logits, output), 1234, len(output))
        output.append(token)
    assert len(draft) == 6


def test_rejection_mode_sends_the_law_it_drew_from(drafter: Drafter, oracle: transformers.PreTrainedModel) -> None:
    params = SamplingParams(temperature=1.0)
    prompt = prompt_of(4)
    with torch.inference_mode():
        probs = oracle(torch.tensor([prompt])).logits[0, -1].double().softmax(-1).numpy()
    places = []
    for key in range(1500):
        session = drafter.open(prompt, params, SpeculationMode.REJECTION, stream_key=key)
        (proposal,) = drafter.propose((session, 0, [], 1))
        drafter.method.close(session)
        (law,) = proposal.laws
        assert sum(law.counts) == LAW_TOTAL
        assert len(law.token_ids) == LAW_SIZE
        places.append(law.token_ids.index(proposal.token_ids[0]))
        assert proposal.confidence[0] == min(255, law.counts[places[-1]] * 256 // LAW_TOTAL)
    likeliest = np.argsort(-probs)[:LAW_SIZE]
    assert list(law.token_ids) == likeliest.tolist()
    shares = probs[likeliest] / probs[likeliest].sum()
    np.testing.assert_allclose(np.array(law.counts) / LAW_TOTAL, shares, atol=(LAW_SIZE + 1) / LAW_TOTAL)
    expected = np.array(law.counts) / LAW_TOTAL
    assert chi_square_p_value(np.bincount(places, minlength=LAW_SIZE), expected) > SMALLEST_P_VALUE


def test_a_session_that_is_opened_again_does_not_draw_with_the_same_numbers(drafter: Drafter) -> None:
    """Another drafter takes over in the middle: numbers that led to tokens of the output must not come again."""
    params = SamplingParams(temperature=100.0)  # flat: the place in the law shows the number that was drawn
    same = 0
    for key in range(60):
        places = []
        for committed in ((), (5, 6, 7)):
            session = drafter.open(prompt_of(0), params, SpeculationMode.REJECTION, committed=committed, stream_key=key)
            (proposal,) = drafter.propose((session, len(committed), [], 1))
            again = drafter.propose((session, len(committed), [], 1))[0]
            assert (again.token_ids, again.laws) == (proposal.token_ids, proposal.laws), (
                "a repeated step draws the same"
            )
            drafter.method.close(session)
            places.append(proposal.laws[0].token_ids.index(proposal.token_ids[0]))
        same += places[0] == places[1]
    assert same < 12, "about 60 / 32 by chance"


@pytest.mark.parametrize("num_blocks", [1, 6, 8, 13, 20])
def test_too_few_blocks_give_fewer_drafts_but_right_ones(
    loaded: LoadedModel, oracle: transformers.PreTrainedModel, num_blocks: int
) -> None:
    """Four sessions of 6 to 9 blocks each; asked alone and in pairs."""
    drafter = Drafter(loaded, num_blocks=num_blocks)
    sessions = [drafter.open(prompt_of(seed, 21)) for seed in range(4)]
    num_proposed = 0
    for step, pair in enumerate(itertools.islice(itertools.cycle(itertools.combinations(range(4), 2)), 12)):
        asks = [(sessions[seed], sessions[seed].committed_len, [step % VOCAB_SIZE], 4) for seed in pair]
        for proposal, (session, *_) in zip(drafter.propose(*asks), asks, strict=True):
            tokens = list(proposal.token_ids)
            num_proposed += len(tokens)
            assert len(tokens) in (0, 4)
            assert tokens == continuation(oracle, session.token_ids, 4)[: len(tokens)]
    assert (num_proposed == 0) == (num_blocks == 1 or num_blocks == 6)
    for session in sessions:
        drafter.method.close(session)
    drafter.blocks.check_integrity()
    assert drafter.blocks.num_free_blocks == num_blocks


def test_long_prompts_are_caught_up_with_in_pieces(loaded: LoadedModel, oracle: transformers.PreTrainedModel) -> None:
    drafter = Drafter(loaded, prefill_chunk_size=16)
    prompt = prompt_of(6, 150)
    spec = SessionSpec("s", 1, tuple(prompt), (), GREEDY, SpeculationMode.EXACT, 0, method="draft_model")
    session = DraftSession(spec, list(prompt), lambda _reply: None)
    drafter.method.open(session)
    pieces = 1
    while drafter.method.advance(session):
        pieces += 1
    assert pieces == -(-(150 - CATCH_UP_ROWS) // 16)
    assert drafter.tokens(session, 0, [], 4) == continuation(oracle, prompt, 4)


def test_a_second_session_on_the_same_prompt_shares_its_blocks(
    drafter: Drafter, oracle: transformers.PreTrainedModel
) -> None:
    prompt = prompt_of(7, 40)
    first, second = drafter.open(prompt), drafter.open(prompt)
    assert drafter.tokens(first, 0, [], 3) == continuation(oracle, prompt, 3)
    third = drafter.open(prompt)
    used = drafter.num_blocks - drafter.blocks.num_free_blocks
    assert used <= 12
    assert drafter.tokens(third, 0, [], 3) == drafter.tokens(second, 0, [], 3) == continuation(oracle, prompt, 3)
    assert drafter.tokens(first, 0, [9], 3) == continuation(oracle, [*prompt, 9], 3)
    assert drafter.tokens(third, 0, [8], 3) == continuation(oracle, [*prompt, 8], 3)


@pytest.mark.parametrize("length", [MAX_LEN - 3, MAX_LEN - 1, MAX_LEN, MAX_LEN + 5])
def test_drafts_end_where_the_draft_models_context_ends(drafter: Drafter, length: int) -> None:
    session = drafter.open(prompt_of(8, length))
    assert len(drafter.tokens(session, 0, [], 10)) == max(0, MAX_LEN - length)


def test_the_longest_draft_is_bounded(drafter: Drafter) -> None:
    session = drafter.open(prompt_of(9))
    assert len(drafter.tokens(session, 0, [], 1000)) == MAX_DRAFT_TOKENS


def test_a_session_without_a_law_drafts_nothing_and_its_peer_goes_on(
    loaded: LoadedModel, oracle: transformers.PreTrainedModel
) -> None:
    from dataclasses import replace

    drafter = Drafter(replace(loaded, eos_token_ids=()))
    hopeless = SamplingParams(temperature=1.0, allowed_token_ids=(4,), bad_words=((4,),))
    broken, peer = drafter.open(prompt_of(0), hopeless), drafter.open(prompt_of(1))
    proposals = drafter.propose((broken, 0, [], 3), (peer, 0, [], 3))
    assert proposals[0].token_ids == ()
    assert list(proposals[1].token_ids) == continuation(oracle, prompt_of(1), 3)
