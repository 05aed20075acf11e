"""Rejection on the GPU: against the reference, the verifier's own rules, and the exact law by enumeration."""

from __future__ import annotations

import itertools
from typing import cast

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.kernels.rejection_sample import reference
from outrider.kernels.rejection_sample.drafts import ChainDrafts
from outrider.kernels.rejection_sample.triton import Decisions, decide, draw, rejection_sample
from outrider.kernels.sampling_support.reference import log_weights
from outrider.kernels.sampling_support.triton import row_laws
from outrider.shared.messages import LAW_TOTAL, Proposal, SparseLaw
from outrider.verifier_service.acceptance import block, standard
from tests.kernels.sampling.sampling_cases import FIELDS, random_keys, random_logits, transforms
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu

RULES = {0: standard.accept, 1: block.accept}
Law = dict[int, int]


class GivenUniforms:
    """What the rules use of a generator."""

    def __init__(self, uniforms: list[float]) -> None:
        self._uniforms = [*uniforms, 0.5]

    def random(self) -> float:
        return self._uniforms.pop(0)


def tensor(values: object, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device())


def flat_drafts(
    chains: list[list[tuple[int, Law]] | None], block_rules: list[int], num_spare_rows: int = 0
) -> ChainDrafts:
    """Chains of (token, law), None for a session without rows; poison wherever nothing may be read."""
    starts, tokens, laws = [0], [], []
    for chain in chains:
        if chain is not None:
            tokens += [-(2**40), *(token for token, _ in chain)]
            laws += [None, *(law for _, law in chain)]
        starts.append(len(tokens))
    tokens += [-(2**40)] * num_spare_rows
    laws += [None] * num_spare_rows
    width = max([1, *(len(law) for law in laws if law)])
    ids = [[2**30] * width if law is None else [*law, *[0] * (width - len(law))] for law in laws]
    counts = [[LAW_TOTAL] * width if law is None else [*law.values(), *[0] * (width - len(law))] for law in laws]
    # The reference scatters every row into a dense one, root rows too.
    ids = [[0] * width if law is None else row for row, law in zip(ids, laws, strict=True)]
    return ChainDrafts(
        row_starts=tensor(starts, torch.int32),
        token_ids=tensor(tokens, torch.int64),
        law_token_ids=tensor(ids, torch.int32).view(len(tokens), width),
        law_counts=tensor(counts, torch.int32).view(len(tokens), width),
        law_total=LAW_TOTAL,
        block_rules=tensor(block_rules, torch.int32),
    )


def random_law(generator: np.random.Generator, vocab_size: int, size: int) -> Law:
    ids = generator.choice(vocab_size, size, replace=False)
    counts = 1 + generator.multinomial(LAW_TOTAL - size, generator.dirichlet(np.ones(size)))
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def random_chain(generator: np.random.Generator, vocab_size: int, length: int) -> list[tuple[int, Law]]:
    chain = []
    for _ in range(length):
        law = random_law(generator, vocab_size, int(generator.integers(1, min(6, vocab_size) + 1)))
        chain.append((int(generator.choice(list(law))), law))
    return chain


@pytest.mark.parametrize(("vocab_size", "dtype"), [(6, torch.float32), (40, torch.bfloat16)])
def test_agrees_with_reference_over_ragged_sessions(vocab_size: int, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(vocab_size)
    lengths = [3, 0, None, 1, 4, 2, 3, None, 2, 1]
    chains = [None if length is None else random_chain(generator, vocab_size, length) for length in lengths]
    drafts = flat_drafts(chains, [0, 1] * 5, num_spare_rows=2)
    num_rows = len(drafts.token_ids)
    logits = random_logits(num_rows, vocab_size, dtype, 1.0)
    fields = transforms([FIELDS[(1, 1, 4, 0, 2, 8)[row % 6]] for row in range(num_rows)])
    keys = random_keys(len(lengths))
    uniforms = tensor(generator.random(num_rows), torch.float64)
    num_accepted, final_tokens = rejection_sample(logits, fields, drafts, uniforms, keys)
    expected_accepted, expected_tokens = reference.rejection_sample(logits, fields, drafts, uniforms, keys)
    assert torch.equal(num_accepted, expected_accepted)
    assert torch.equal(final_tokens, expected_tokens)
    assert final_tokens[2] == -1


def test_accepts_what_the_verifiers_rules_accept() -> None:
    generator = np.random.default_rng(5)
    vocab_size, num_sessions, length = 8, 24, 3
    chains: list[list[tuple[int, Law]] | None] = [
        random_chain(generator, vocab_size, length) for _ in range(num_sessions)
    ]
    rules = [session % 2 for session in range(num_sessions)]
    drafts = flat_drafts(chains, rules)
    logits = random_logits(num_sessions * (length + 1), vocab_size, torch.float32, 0.7)
    fields = transforms([FIELDS[1]] * len(logits))
    uniforms = generator.random(len(logits)) * 0.8
    laws = row_laws(logits, fields, with_mass=True)
    decisions = decide(logits, laws, drafts, tensor(uniforms, torch.float64))
    target = log_weights(logits, fields).cpu().numpy()
    counts = []
    for session, chain in enumerate(chains):
        assert chain is not None
        rows = slice(session * (length + 1), (session + 1) * (length + 1))
        sparse = tuple(SparseLaw(tuple(law), tuple(law.values())) for _, law in chain)
        proposal = Proposal(0, tuple(token for token, _ in chain), "", laws=sparse)
        rng = cast(np.random.Generator, GivenUniforms(uniforms[rows].tolist()))
        accepted = RULES[rules[session]](lambda node, rows=rows: target[rows][node + 1], proposal, rng=rng)
        counts.append(len(accepted.accepted_nodes))
    assert decisions.num_accepted.tolist() == counts
    assert len(set(counts)) > 2


def test_many_sessions_are_decided_as_by_the_reference() -> None:
    """Drafts of the target's likeliest tokens, so that some are accepted and some are not."""
    vocab_size, num_sessions, length, width = (4096, 64, 5, 8) if device().type == "cuda" else (64, 4, 3, 4)
    num_rows = num_sessions * (length + 1)
    generator = torch.Generator().manual_seed(3)
    logits = random_logits(num_rows, vocab_size, torch.float32)
    law_ids = logits.topk(width, dim=1).indices.roll(1, 0).cpu()
    shares = torch.rand(num_rows, width, generator=generator)
    counts = (shares / shares.sum(1, keepdim=True) * (LAW_TOTAL - width)).long() + 1
    counts[:, 0] += LAW_TOTAL - counts.sum(1)
    drawn = torch.multinomial(counts.float(), 1, generator=generator)
    drafts = ChainDrafts(
        row_starts=tensor(range(0, num_rows + 1, length + 1), torch.int32),
        token_ids=law_ids.gather(1, drawn)[:, 0].to(device()),
        law_token_ids=law_ids.to(torch.int32).to(device()),
        law_counts=counts.to(torch.int32).to(device()),
        law_total=LAW_TOTAL,
        block_rules=tensor([session % 2 for session in range(num_sessions)], torch.int32),
    )
    uniforms = torch.rand(num_rows, dtype=torch.float64, generator=generator).to(device())
    arguments = (logits, transforms([FIELDS[1]] * num_rows), drafts, uniforms, random_keys(num_sessions))
    accepted, tokens = rejection_sample(*arguments)
    expected_accepted, expected_tokens = reference.rejection_sample(*arguments)
    assert torch.equal(accepted, expected_accepted)
    assert torch.equal(tokens, expected_tokens)
    assert 0 < int(accepted.sum()) < num_sessions * length


NUM_IDS = 4
HALF, QUARTER = LAW_TOTAL // 2, LAW_TOTAL // 4
LAWS: dict[str, list[Law]] = {
    "spread": [{0: HALF, 1: QUARTER, 3: LAW_TOTAL - HALF - QUARTER}, {2: QUARTER, 1: LAW_TOTAL - QUARTER}],
    "point": [{2: LAW_TOTAL}, {0: LAW_TOTAL}],
    "whole": [
        {0: LAW_TOTAL - 3 * QUARTER, 1: QUARTER, 2: QUARTER, 3: QUARTER},
        {3: QUARTER, 1: LAW_TOTAL - 3 * QUARTER, 0: QUARTER, 2: QUARTER},
    ],
}


@pytest.mark.parametrize("law_name", LAWS)
@pytest.mark.parametrize("rule", [0, 1])
def test_law_of_the_output_is_the_targets_by_enumeration(law_name: str, rule: int) -> None:
    """Over all drafts, all numbers of accepted tokens: the chance is the kernel's, what follows is worked out here."""
    first_law, second_law = LAWS[law_name]
    generator = np.random.default_rng(1)
    logits = [generator.normal(size=(NUM_IDS,) * (depth + 1)).astype(np.float32) for depth in range(3)]
    target = [np.exp(level.astype(np.float64)) for level in logits]
    target = [level / level.sum(-1, keepdims=True) for level in target]
    pairs = list(itertools.product(first_law, second_law))
    drafts = flat_drafts([[(x, first_law), (y, second_law)] for x, y in pairs], [rule] * len(pairs))
    rows = np.concatenate([np.stack([logits[0], logits[1][x], logits[2][x, y]]) for x, y in pairs])
    device_rows = tensor(rows, torch.float32)
    laws = row_laws(device_rows, transforms([FIELDS[1]] * len(rows)), with_mass=True)
    # Uniforms of 0: nothing is refused, so that every chance is worked out.
    decisions = decide(device_rows, laws, drafts, torch.zeros(len(rows), dtype=torch.float64, device=device()))
    hold_probs = decisions.hold_probs.cpu().numpy().reshape(len(pairs), 3)
    # These hold place 1 alone: what P it gives the residual there.
    second = tensor([1.0, 0.0, 1.0] * len(pairs), torch.float64)
    factors = decide(device_rows, laws, drafts, second).factors.tolist()
    dense = [np.zeros(NUM_IDS), np.zeros(NUM_IDS)]
    for probs, law in zip(dense, (first_law, second_law), strict=True):
        probs[list(law)] = np.array(list(law.values())) / LAW_TOTAL
    output = np.zeros((NUM_IDS,) * 3)
    for (x, y), holds, factor in zip(pairs, hold_probs, factors, strict=True):
        drafted = dense[0][x] * dense[1][y]
        if rule:
            chances = [holds[0] * (1 - holds[1]) * (1 - holds[2]), holds[1] * (1 - holds[2]), holds[2]]
            joint = [1.0, factor]
        else:
            chances = [1 - holds[0], holds[0] * (1 - holds[1]), holds[0] * holds[1]]
            joint = [1.0, 1.0]
        residuals = [np.maximum(joint[0] * target[0] - dense[0], 0), np.maximum(joint[1] * target[1][x] - dense[1], 0)]
        residuals = [law / law.sum() if law.any() else law for law in residuals]
        output += drafted * chances[0] * residuals[0][:, None, None] * target[1][:, :, None] * target[2]
        output[x] += drafted * chances[1] * residuals[1][:, None] * target[2][x]
        output[x, y] += drafted * chances[2] * target[2][x, y]
    expected = target[0][:, None, None] * target[1][:, :, None] * target[2]
    np.testing.assert_allclose(output, expected, atol=2e-6)


@pytest.mark.parametrize("factor", [0.625, -1.0])
def test_last_token_follows_the_residual(factor: float) -> None:
    num_draws = 200 if device().type == "cpu" else 200_000
    law = {1: LAW_TOTAL // 2, 6: LAW_TOTAL - LAW_TOTAL // 2}
    logits = random_logits(2, 8, torch.float32, 0.5)
    laws = row_laws(logits, transforms([FIELDS[1]] * 2), with_mass=True)
    # Many sessions that draw from one row.
    one = flat_drafts([[(1, law)]], [1])
    drafts = ChainDrafts(
        torch.zeros(num_draws + 1, dtype=torch.int32, device=device()),
        one.token_ids,
        one.law_token_ids,
        one.law_counts,
        LAW_TOTAL,
        torch.zeros(num_draws, dtype=torch.int32, device=device()),
    )
    decisions = Decisions(
        num_accepted=torch.zeros(num_draws, dtype=torch.int32, device=device()),
        final_rows=torch.zeros(num_draws, dtype=torch.int32, device=device()),
        factors=torch.full((num_draws,), factor, dtype=torch.float64, device=device()),
        hold_probs=torch.zeros(2, dtype=torch.float64, device=device()),
    )
    tokens = draw(logits, laws, drafts, decisions, random_keys(num_draws))
    target_probs = torch.softmax(logits[0].double(), 0).cpu().numpy()
    expected = target_probs.copy()
    if factor > 0:
        dense = np.zeros(8)
        dense[list(law)] = np.array(list(law.values())) / LAW_TOTAL
        expected = np.maximum(factor * target_probs - dense, 0.0)
    expected /= expected.sum()
    seen = np.bincount(tokens.cpu().numpy(), minlength=8)
    assert (seen[expected == 0.0] == 0).all()
    assert stats.chisquare(seen[expected > 0], num_draws * expected[expected > 0]).pvalue > 1e-4


def test_equal_laws_leave_no_residual_and_draw_from_the_target() -> None:
    """Greedy on a point mass: the token is never refused, and where the rule is told so, the target answers."""
    logits = random_logits(2, 8, torch.float32)
    best = int(logits[0].argmax())
    drafts = flat_drafts([[(best, {best: LAW_TOTAL})]], [1])
    fields = transforms([FIELDS[0]] * 2)
    laws = row_laws(logits, fields, with_mass=True)
    refused = Decisions(
        *(
            tensor(v, d)
            for v, d in (([0], torch.int32), ([0], torch.int32), ([1.0], torch.float64), ([0.0], torch.float64))
        )
    )
    assert draw(logits, laws, drafts, refused, random_keys(1)).tolist() == [best]
    uniforms = tensor([0.999, 0.999], torch.float64)
    num_accepted, final_tokens = rejection_sample(logits, fields, drafts, uniforms, random_keys(1))
    assert (num_accepted.tolist(), final_tokens.tolist()) == ([1], [int(logits[1].argmax())])


def test_a_session_does_not_depend_on_the_others() -> None:
    generator = np.random.default_rng(9)
    chains: list[list[tuple[int, Law]] | None] = [random_chain(generator, 12, 2) for _ in range(3)]
    logits, fields = random_logits(9, 12, torch.float32, 0.3), transforms([FIELDS[1]] * 9)
    uniforms, keys = tensor(generator.random(9), torch.float64), random_keys(3)
    together = rejection_sample(logits, fields, flat_drafts(chains, [1, 0, 1]), uniforms, keys)
    alone = rejection_sample(
        logits[6:], transforms([FIELDS[1]] * 3), flat_drafts(chains[2:], [1]), uniforms[6:], keys[2:]
    )
    assert [int(alone[0]), int(alone[1])] == [int(together[0][2]), int(together[1][2])]
