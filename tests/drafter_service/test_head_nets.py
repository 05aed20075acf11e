"""What heads propose through paged caches, batches and trees is what the same head says on whole sequences.

The oracle runs a head with transformers' eager attention over the whole path, with no cache; whether the head itself
follows its paper is tested beside it (tests/drafter_service/heads).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from drafter_service.growth.draft import ROOT
from drafter_service.heads.decoder import DecoderConfig
from drafter_service.heads.eagle import EagleConfig, EagleHead
from drafter_service.heads.eagle3 import Eagle3Config, Eagle3Head
from drafter_service.heads.medusa import MedusaConfig, MedusaHeads
from drafter_service.heads.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig
from drafter_service.methods.eagle import CATCH_UP_ROWS, EagleNet
from drafter_service.methods.growing import GrowingMethod
from drafter_service.methods.medusa import MedusaNet
from drafter_service.methods.mlp_speculator import MlpSpeculatorNet
from drafter_service.methods.paged_head import PagedHead
from drafter_service.methods.target_vocabulary import TargetVocabulary
from drafter_service.session import DraftSession
from engine.attention import ATTENTION_NAME, resolve_attention_ops
from shared.messages import DraftMethodInfo, DraftStep, HiddenStates, Proposal, SessionSpec
from shared.sampling_params import SamplingParams, SpeculationMode

VOCAB_SIZE, HIDDEN = 50, 32
NUM_TARGET_LAYERS = 6
DECODER = DecoderConfig(
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    vocab_size=VOCAB_SIZE,
)
KINDS = (
    "eagle",
    "eagle two layers",
    "eagle3",
    "eagle3 small vocabulary",
    "eagle3 one layer twice",
    "medusa",
    "mlp",
    "mlp tied",
)
RECURRENT = KINDS[:5]


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build_head(kind: str, attention: str) -> Any:
    torch.manual_seed(KINDS.index(kind))
    embedding, lm_head = torch.randn(VOCAB_SIZE, HIDDEN), torch.randn(VOCAB_SIZE, HIDDEN)
    target: dict[str, Any] = {"embedding": embedding, "lm_head": lm_head, "attn_implementation": attention}
    if kind.startswith("eagle3"):
        small = kind.endswith("vocabulary")
        layers = (3, 1, 3) if kind.endswith("twice") else (1, 3, 5)
        config = Eagle3Config(DECODER, feature_layers=layers, draft_vocab_size=20 if small else 0)
        d2t = torch.sort(torch.randperm(VOCAB_SIZE)[:20]).values - torch.arange(20) if small else None
        head: Any = Eagle3Head(config, **(target | {"lm_head": None}), d2t=d2t)
    elif kind.startswith("eagle"):
        layers = 2 if "two" in kind else 1
        decoder = DecoderConfig(**(vars(DECODER) | {"num_hidden_layers": layers}))
        head = EagleHead(EagleConfig(decoder, NUM_TARGET_LAYERS), **target)
    elif kind == "medusa":
        head = MedusaHeads(MedusaConfig(HIDDEN, VOCAB_SIZE, num_heads=4))
    else:
        head = MlpSpeculator(MlpSpeculatorConfig(VOCAB_SIZE, HIDDEN, n_predict=4, tie_weights="tied" in kind))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    return head.eval()


class Case:
    """A method over a head, and the same head for the oracle."""

    def __init__(self, kind: str, kv_cache_bytes: int = 2**20) -> None:
        self.kind = kind
        self.oracle = build_head(kind, "eager")
        served = copy.deepcopy(build_head(kind, ATTENTION_NAME))
        target_ids = getattr(served, "target_ids", None)
        vocabulary = TargetVocabulary(VOCAB_SIZE, target_ids)
        self.feature_layers = tuple(getattr(served, "feature_layers", (NUM_TARGET_LAYERS,)))
        self.layers = tuple(dict.fromkeys(self.feature_layers))
        self.target_ids = None if target_ids is None else target_ids.tolist()
        if kind in RECURRENT:
            ops = resolve_attention_ops("cpu", torch.device("cpu"))
            self.paged = PagedHead(served, ops, torch.float32, kv_cache_bytes=kv_cache_bytes, block_size=4)
            net: Any = EagleNet(self.paged, vocabulary, prefill_chunk_size=16)
        elif kind == "medusa":
            net = MedusaNet(served, vocabulary, torch.float32)
        else:
            net = MlpSpeculatorNet(served, vocabulary, torch.float32)
        info = DraftMethodInfo(kind, max_num_draft_tokens=4, hidden_layers=self.layers, proposes_trees=True)
        self.method = GrowingMethod(net, info, eos_token_ids=(), grammars=None, max_depth=4)  # type: ignore[arg-type]

    def open(self, prompt: Sequence[int], params: SamplingParams, mode: SpeculationMode) -> DraftSession:
        spec = SessionSpec("s", 1, tuple(prompt), (), params, mode, stream_key=9)
        session = DraftSession(spec, list(prompt), lambda _reply: None)
        self.method.open(session)
        return session

    def report(self, session: DraftSession, target: Target, committed: Sequence[int], first: int, step: int) -> None:
        """Commits tokens and sends the rows from output index `first` on."""
        base_len = session.committed_len
        session.report(
            DraftStep(
                1,
                base_len,
                tuple(committed),
                step,
                hidden_states=(target.rows(first, base_len + len(committed) - 1),),
            )
        )
        while self.method.advance(session):
            pass

    def logits(self, token_ids: Sequence[int], features: torch.Tensor, path: Sequence[int]) -> np.ndarray:
        """float [V] after the committed tokens and a draft path, by the oracle."""
        with torch.inference_mode():
            if self.kind == "medusa":
                row = self.oracle(features[-1:])[0, len(path)]
            elif self.kind.startswith("mlp"):
                state = self.oracle.start(features[-1:])
                for depth, token in enumerate([token_ids[-1], *path]):
                    state, rows = self.oracle.step(state, torch.tensor([token]), depth)
                row = rows[0]
            else:
                inputs = self.oracle.fuse(features)[None]
                tokens = list(token_ids[1:])
                for token in [*path, None]:
                    positions = torch.arange(len(tokens))[None]
                    out = self.oracle(torch.tensor([tokens]), inputs, positions)[0, -1]
                    if token is not None:
                        inputs = torch.cat((inputs, out[None, None]), dim=1)
                        tokens.append(token)
                row = self.oracle.logits(out[None])[0]
        if self.target_ids is None:
            return row.numpy()
        full = np.full(VOCAB_SIZE, -np.inf)
        full[self.target_ids] = row.numpy()
        return full


class Target:
    """Hidden states of every position of one session: random, as good as any."""

    def __init__(self, case: Case, prompt_len: int, seed: int) -> None:
        self.layers, self.prompt_len = case.layers, prompt_len
        self.order = [case.layers.index(layer) for layer in case.feature_layers]
        generator = torch.Generator().manual_seed(seed)
        self.states = torch.randn((len(case.layers), 300, HIDDEN), generator=generator)

    def rows(self, first: int, end: int) -> HiddenStates:
        part = self.states[:, self.prompt_len + first : self.prompt_len + end].contiguous()
        return HiddenStates(first, self.layers, part.shape[1], HIDDEN, "float32", part.numpy().tobytes())

    def features(self, start: int, end: int) -> torch.Tensor:
        """[end - start, layers * H] of absolute positions."""
        return self.states[self.order, start:end].transpose(0, 1).reshape(end - start, -1)


def check(case: Case, session: DraftSession, target: Target, proposal: Proposal, first: int = 0) -> None:
    """Each node stands where the oracle's ranking of its place says (greedy)."""
    tokens = session.token_ids
    features = target.features(first, len(tokens) - 1)
    parents = proposal.parents or tuple(range(-1, len(proposal.token_ids) - 1))
    assert proposal.token_ids
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    for place, nodes in children.items():
        path: list[int] = []
        at = place
        while at != ROOT:
            path.insert(0, proposal.token_ids[at])
            at = parents[at]
        ranking = np.argsort(-case.logits(tokens[first:], features, path), kind="stable")
        assert [proposal.token_ids[node] for node in nodes] == ranking[: len(nodes)].tolist(), (place, path)


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_sessions_in_one_batch_propose_what_the_head_says(kind: str, tree: bool) -> None:
    case = Case(kind)
    lengths = (7, 3, CATCH_UP_ROWS + 40)
    sessions = [
        case.open(prompt_of(seed, length), GREEDY, SpeculationMode.EXACT) for seed, length in enumerate(lengths)
    ]
    targets = [Target(case, length, seed) for seed, length in enumerate(lengths)]
    rng = random.Random(3)
    for _round in range(4):
        for session, target in zip(sessions, targets, strict=True):
            first = -session.prompt_len if session.committed_len == 0 else session.committed_len - 1
            committed = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 4))]
            case.report(session, target, committed, first, 4)
            if tree and session.step is not None:
                session.step = DraftStep(1, 0, (), 4, max_tree_nodes=10)
        proposals = case.method.propose(sessions)
        for session, target, proposal in zip(sessions, targets, proposals, strict=True):
            assert bool(proposal.parents) == tree
            check(case, session, target, proposal)


@pytest.mark.parametrize("kind", KINDS)
def test_asked_twice_without_a_commit_it_says_the_same(kind: str) -> None:
    case = Case(kind)
    session = case.open(prompt_of(1, 9), GREEDY, SpeculationMode.EXACT)
    target = Target(case, 9, 1)
    case.report(session, target, [5], -9, 3)
    first = case.method.propose([session])
    assert case.method.propose([session]) == first
    check(case, session, target, first[0])


@pytest.mark.parametrize("kind", KINDS)
def test_without_its_hidden_states_it_asks_for_them(kind: str) -> None:
    case = Case(kind)
    session = case.open(prompt_of(1, 9), GREEDY, SpeculationMode.EXACT)
    session.report(DraftStep(1, 0, (4, 4), 3))
    assert case.method.propose([session])[0].token_ids == ()
    assert session.missing_hidden_from == (-9 if kind in RECURRENT else 0)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_prefix_whose_states_are_gone_is_left_out(kind: str) -> None:
    case = Case(kind)
    session = case.open(prompt_of(2, 20), GREEDY, SpeculationMode.EXACT)
    target = Target(case, 20, 2)
    case.report(session, target, [5, 6], -12, 4)
    proposal = case.method.propose([session])[0]
    check(case, session, target, proposal, first=8)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_session_whose_rows_were_taken_goes_on_with_what_comes(kind: str) -> None:
    """One cache for one session: the second takes the first one's rows, both go on proposing."""
    bytes_per_block = 4 * 2 * 16 * 4 * (2 if "two" in kind else 1)
    case = Case(kind, kv_cache_bytes=8 * bytes_per_block)
    sessions = [case.open(prompt_of(seed, 20), GREEDY, SpeculationMode.EXACT) for seed in range(2)]
    targets = [Target(case, 20, seed) for seed in range(2)]
    for session, target in zip(sessions, targets, strict=True):
        case.report(session, target, [5], -20, 4)
        check(case, session, target, case.method.propose([session])[0])
        case.paged.blocks.check_integrity()
    case.report(sessions[0], targets[0], [7], 0, 4)
    proposal = case.method.propose([sessions[0]])[0]
    check(case, sessions[0], targets[0], proposal, first=20)
    for session in sessions:
        case.method.close(session)
    assert case.paged.blocks.num_free_blocks == case.paged.blocks.num_blocks


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_taken_back_are_forgotten(kind: str) -> None:
    case = Case(kind)
    session = case.open(prompt_of(4, 12), GREEDY, SpeculationMode.EXACT)
    target = Target(case, 12, 4)
    case.report(session, target, [1, 2, 3, 4], -12, 4)
    case.method.propose([session])
    session.report(DraftStep(1, 1, (9, 9, 9), 4, hidden_states=(target.rows(0, 3),)))
    proposal = case.method.propose([session])[0]
    check(case, session, target, proposal)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [SpeculationMode.EXACT, SpeculationMode.REJECTION])
def test_sampling_modes_propose(kind: str, mode: SpeculationMode) -> None:
    case = Case(kind)
    params = SamplingParams(temperature=0.8, seed=2 if mode is SpeculationMode.EXACT else None, top_k=8)
    session = case.open(prompt_of(5, 12), params, mode)
    case.report(session, Target(case, 12, 5), [1, 2], -12, 4)
    session.step = DraftStep(1, 0, (), 4, max_tree_nodes=9)
    proposal = case.method.propose([session])[0]
    assert 4 <= len(proposal.token_ids) <= 9
    assert bool(proposal.laws) == (mode is SpeculationMode.REJECTION)
