"""Heads whose chains are drawn on the device propose what the same heads propose when they grow on the host."""

from __future__ import annotations

import pytest
import torch

from outrider.drafting.session import DraftSession
from outrider.shared.messages import DraftStep, Proposal
from tests.drafting.drawn_cases import (
    LAWS,
    NUM_PLAIN,
    SCRIPT,
    committed_after,
    counted,
    expect_equal_rounds,
    prompt_at,
)
from tests.drafting.head_cases import RECURRENT, Case, Target
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu

_KINDS = ("eagle", "eagle3", "eagle3 small vocabulary", "assistant", "medusa", "mlp", "mlp tied")


def _proposals(kind: str, num_rounds: int, *, draws: bool) -> list[dict[str, Proposal]]:
    case = Case(kind, backend="triton", device=device(), draws=draws)
    sessions: dict[str, tuple[DraftSession, Target]] = {}
    for place, (name, (params, mode)) in enumerate(LAWS.items()):
        prompt = prompt_at(place)
        sessions[name] = case.open(prompt, params, mode, session_id=name), Target(case, len(prompt), place)
    rounds: list[dict[str, Proposal]] = []
    for script, count in SCRIPT[:num_rounds]:
        for place, (name, (session, target)) in enumerate(sessions.items()):
            first = session.committed_len - 1 if rounds else -session.prompt_len
            committed = committed_after(script, rounds[-1][name].token_ids if rounds else ())
            case.report(session, target, committed, first, count + place % 2)
        found = case.method.propose([session for session, _target in sessions.values()])
        rounds.append(dict(zip(sessions, found, strict=True)))
        if kind in RECURRENT:
            case.paged.blocks.check_integrity()
    for session, _target in sessions.values():
        case.method.close(session)
    if kind in RECURRENT:
        assert case.paged.blocks.num_free_blocks == case.paged.blocks.num_blocks
    return rounds


@pytest.mark.parametrize(
    ("kind", "num_rounds"),
    [("eagle3", 1), *(pytest.param(kind, len(SCRIPT), marks=pytest.mark.storm) for kind in _KINDS)],
)
def test_plain_chains_are_drawn_there_and_all_proposals_are_those_of_the_host(
    kind: str, num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = counted(monkeypatch)
    by_device = _proposals(kind, num_rounds, draws=True)
    assert len(taken) == NUM_PLAIN * num_rounds
    expect_equal_rounds(by_device, _proposals(kind, num_rounds, draws=False))
    assert len(taken) == NUM_PLAIN * num_rounds, "the host's chains grow"


@pytest.mark.parametrize("kind", _KINDS)
def test_without_its_hidden_states_nothing_is_drawn_and_they_are_asked_for(kind: str) -> None:
    case = Case(kind, backend="triton", device=device(), draws=True)
    params, mode = LAWS["rejection"]
    served, left_out = (case.open(prompt_at(place), params, mode) for place in range(2))
    case.report(served, Target(case, served.prompt_len, 1), [5], -served.prompt_len, 3)
    left_out.report(DraftStep(1, 0, (4, 4), 3))
    proposals = case.method.propose([left_out, served])
    assert [len(proposal.token_ids) for proposal in proposals] == [0, 3]
    assert left_out.missing_hidden_from == (-left_out.prompt_len if kind in RECURRENT else 0)
    assert len(proposals[1].laws) == 3


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_one_pass_heads_propose_there_what_they_propose_on_the_cpu(kind: str) -> None:
    params, mode = LAWS["greedy"]
    found: list[list[Proposal]] = []
    for backend, place in (("triton", device()), ("cpu", torch.device("cpu"))):
        case = Case(kind, backend=backend, device=place)
        session = case.open(prompt_at(1), params, mode)
        target = Target(case, session.prompt_len, 1)
        case.report(session, target, [5], -session.prompt_len, 4)
        found.append(case.method.propose([session]))
        case.report(session, target, [*found[-1][0].token_ids[:2], 9], 0, 4)
        session.step = DraftStep(1, 0, (), 4, max_tree_nodes=9)
        found[-1] += case.method.propose([session])
    assert found[0] == found[1]
