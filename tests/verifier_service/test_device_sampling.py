"""What is drawn by the GPU's kernels against what the host decides from the same logits (interpreted without a GPU)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.engine.attention.block_manager import BlockTable
from outrider.shared.messages import LAW_TOTAL, Proposal, SparseLaw
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.verifier_service.device_sampling import device_outputs
from outrider.verifier_service.round import Round, decide
from outrider.verifier_service.row_outputs import RowOutputs, host_outputs
from outrider.verifier_service.scheduler import Work
from outrider.verifier_service.session import VerifierSession
from tests.kernels.triton_device import device
from tests.verifier_service.acceptance.toy import SMALLEST_P_VALUE, chi_square_p_value
from tests.verifier_service.test_round import TIMES, VOCAB_SIZE, make_session

pytestmark = [pytest.mark.gpu, pytest.mark.storm]

EXACT, REJECTION = SpeculationMode.EXACT, SpeculationMode.REJECTION
PLAIN = SamplingParams(temperature=0.8, max_tokens=50)
CHAIN = Proposal(0, (4, 5, 1), "x")
TREE = Proposal(0, (4, 5, 1, 2), "x", parents=(-1, -1, 1, 0))


def _work(session: VerifierSession, proposal: Proposal | None, num_prompt_rows: int = 0) -> Work:
    num_nodes = len(proposal.token_ids) if proposal else 0
    session.num_computed = len(session.token_ids) - 1 - num_prompt_rows
    return Work(session, BlockTable(), 1 + num_prompt_rows, proposal, 1 + num_prompt_rows + num_nodes)


def _rounds(plan: list[Work], outputs: list[RowOutputs]) -> list[Round]:
    """Timings differ between two calls; nothing else may."""
    rounds = []
    for work, rows in zip(plan, outputs, strict=True):
        num_nodes = len(work.proposal.token_ids) if work.proposal else 0
        found = decide(work, rows.last(num_nodes + 1), 100, TIMES)
        rounds.append(replace(found, commit=replace(found.commit, timings=TIMES_OF_NOBODY)))
    return rounds


TIMES_OF_NOBODY = decide(_work(make_session(), None), RowOutputs(np.ones((1, 8), np.float32)), 9, TIMES).commit.timings


def _logits(plan: list[Work], seed: int) -> torch.Tensor:
    num_rows = sum(work.num_logits_rows for work in plan)
    return 2 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def test_exact_mode_commits_what_the_host_commits() -> None:
    """All in one step: greedy, truncated laws, chains, trees, prompt rows, and those that need the host."""
    fields = ({}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.9, "min_p": 0.05})
    for seed in range(20 if device().type == "cuda" else 1):
        plan = [
            _work(make_session(replace(PLAIN, **changed), stream_key=seed), proposal, num_prompt_rows)
            for place, changed in enumerate(fields)
            for proposal, num_prompt_rows in (((CHAIN, 0), (TREE, 0), (None, place % 2)))
        ]
        plan.append(_work(make_session(), CHAIN))
        plan.append(_work(make_session(replace(PLAIN, num_logprobs=2), output=(3,)), None))
        plan.append(_work(make_session(replace(PLAIN, presence_penalty=0.5), output=(3,)), replace(CHAIN, base_len=1)))
        logits = _logits(plan, seed)
        assert all(work.samples for work in plan)
        outputs = device_outputs(plan, logits.to(device()))
        # The host's rows are copied for two of them only.
        assert [len(rows.logits) for rows in outputs] == [0] * (len(plan) - 2) + [1, 4]
        assert _rounds(plan, outputs) == _rounds(plan, host_outputs(plan, logits))


def _law(**counts: int) -> SparseLaw:
    token_ids = tuple(int(name[1:]) for name in counts)
    return SparseLaw(token_ids, tuple(counts.values()))


@pytest.mark.parametrize(("rule", "laws"), [("block", True), ("standard", True), ("block", False)])
def test_rejection_mode_keeps_the_law(rule: str, laws: bool) -> None:
    """First tokens over many sessions of one step, drafts drawn from their law: they follow the target's."""
    num_sessions = 20_000 if device().type == "cuda" else 80  # an interpreted session takes 30 ms
    rng = np.random.default_rng(3)
    counts = {"t1": LAW_TOTAL // 2, "t4": LAW_TOTAL // 4, "t6": LAW_TOTAL - LAW_TOTAL // 2 - LAW_TOTAL // 4}
    row = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(9))
    plan = []
    for key in range(num_sessions):
        first, second = (int(token) for token in rng.choice([1, 4, 6], 2, p=[0.5, 0.25, 0.25]))
        law = _law(**counts)
        proposal = Proposal(0, (first, second), "x", laws=(law, law) if laws else ())
        session = make_session(PLAIN, REJECTION, stream_key=key + 1, chain_rule=rule)
        plan.append(_work(session, proposal))
    logits = row.expand(3 * num_sessions, -1).contiguous()
    rounds = _rounds(plan, device_outputs(plan, logits.to(device())))
    target = torch.softmax(row.double() / PLAIN.temperature, 0).numpy()
    for place in (0, 1):
        tokens = [found.commit.token_ids[place] for found in rounds if len(found.commit.token_ids) > place]
        observed = np.bincount(tokens, minlength=VOCAB_SIZE)
        assert chi_square_p_value(observed, target) > SMALLEST_P_VALUE
    assert 0 < sum(found.commit.num_accepted_tokens for found in rounds) < 2 * num_sessions


def test_trees_with_laws_are_the_hosts() -> None:
    law = _law(t4=LAW_TOTAL // 2, t5=LAW_TOTAL // 2)
    tree = Proposal(0, (4, 5), "x", parents=(-1, -1), laws=(law, law))
    plan = [_work(make_session(PLAIN, REJECTION), tree)]
    logits = _logits(plan, 1)
    outputs = device_outputs(plan, logits.to(device()))
    assert _rounds(plan, outputs) == _rounds(plan, host_outputs(plan, logits))


def test_a_row_of_nothing_is_an_error_of_its_session() -> None:
    plan = [_work(make_session(PLAIN), None), _work(make_session(PLAIN), None)]
    logits = _logits(plan, 1)
    logits[0] = -torch.inf
    outputs = device_outputs(plan, logits.to(device()))
    with pytest.raises(ArithmeticError, match="no finite logit"):
        _rounds(plan[:1], outputs[:1])
    assert _rounds(plan[1:], outputs[1:])
