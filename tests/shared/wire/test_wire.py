"""Every message to bytes and back is itself, and a message that makes no sense is refused."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.shared import messages as m
from outrider.shared import wire
from outrider.shared.errors import InvalidRequest
from outrider.shared.sampling_params import Grammar, GrammarKind, SamplingParams, SpeculationMode, ThinkingBudget
from outrider.v1 import common_pb2, drafter_pb2, verifier_pb2

token_ids = st.integers(0, 2**31 - 1)
token_tuples = st.lists(token_ids, max_size=6).map(tuple)
lengths = st.integers(0, 2**40)
doubles = st.floats(allow_nan=False, allow_infinity=False)
singles = st.floats(width=32, allow_nan=False, allow_infinity=False)
names = st.text(max_size=8)
options = settings(max_examples=60, deadline=None, derandomize=True)


def through_bytes(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@st.composite
def sparse_laws(draw: st.DrawFn, holding: int) -> m.SparseLaw:
    others = draw(st.lists(token_ids.filter(lambda token: token != holding), unique=True, max_size=4))
    cuts = sorted(draw(st.sets(st.integers(1, m.LAW_TOTAL - 1), min_size=len(others), max_size=len(others))))
    counts = [end - start for start, end in zip([0, *cuts], [*cuts, m.LAW_TOTAL], strict=True)]
    place = draw(st.integers(0, len(others)))
    return m.SparseLaw((*others[:place], holding, *others[place:]), tuple(counts))


@st.composite
def proposals(draw: st.DrawFn) -> m.Proposal:
    tokens = draw(token_tuples)
    count = len(tokens)
    is_tree = draw(st.booleans())
    return m.Proposal(
        base_len=draw(lengths),
        token_ids=tokens,
        method=draw(names),
        parents=tuple(draw(st.integers(-1, node - 1)) for node in range(count)) if is_tree else (),
        laws=tuple(draw(sparse_laws(token)) for token in tokens) if not is_tree and draw(st.booleans()) else (),
        confidence=draw(st.binary(min_size=count, max_size=count)) if draw(st.booleans()) else b"",
    )


sampling_params = st.builds(
    SamplingParams,
    temperature=st.floats(1e-4, 100.0) | st.just(0.0),
    top_p=st.floats(1e-9, 1.0),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0.0, 1.0),
    seed=st.none() | st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 2**31 - 1),
    min_tokens=st.just(0),
    stop_token_ids=token_tuples,
    ignore_eos=st.booleans(),
    presence_penalty=st.floats(-2.0, 2.0),
    frequency_penalty=st.floats(-2.0, 2.0),
    repetition_penalty=st.floats(1e-3, 100.0),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100, width=32), max_size=4).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    bad_words=st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    allowed_token_ids=token_tuples,
    num_logprobs=st.none() | st.integers(0, 20),
    num_prompt_logprobs=st.none() | st.integers(0, 20),
    logprob_token_ids=token_tuples,
    grammar=st.none()
    | st.builds(Grammar, st.sampled_from([GrammarKind.REGEX, GrammarKind.LARK, GrammarKind.JSON_OBJECT]), names)
    | st.sampled_from([Grammar(GrammarKind.JSON_SCHEMA, "{}"), Grammar(GrammarKind.CHOICE, '["a", "é"]')]),
    thinking_budget=st.none()
    | st.builds(ThinkingBudget, st.integers(0, 9), token_ids, token_tuples, token_tuples, st.booleans()),
).map(lambda params: params if params.num_logprobs is not None else dataclasses.replace(params, logprob_token_ids=()))
specs = st.builds(
    m.SessionSpec,
    session_id=st.text(min_size=1, max_size=8),
    epoch=lengths,
    prompt_token_ids=st.lists(token_ids, min_size=1, max_size=6).map(tuple),
    committed_token_ids=token_tuples,
    sampling_params=sampling_params,
    mode=st.sampled_from(SpeculationMode),
    stream_key=st.integers(0, 2**64 - 1),
    cache_salt=names,
)
timings = st.builds(m.Timings, *[st.integers(0, 2**40)] * 4)
logprobs = st.lists(
    st.builds(m.TokenLogprob, singles, st.integers(0, 2**30), token_tuples, st.lists(singles, max_size=3).map(tuple)),
    max_size=3,
).map(tuple)


@st.composite
def hidden_states(draw: st.DrawFn) -> m.HiddenStates:
    layers = draw(st.lists(st.integers(0, 99), max_size=3).map(tuple))
    num_rows, width = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    dtype, item_bytes = draw(st.sampled_from([("bfloat16", 2), ("float16", 2), ("float32", 4)]))
    size = len(layers) * num_rows * width * item_bytes
    data = draw(st.binary(min_size=size, max_size=size))
    return m.HiddenStates(draw(st.integers(-(2**40), 2**40)), layers, num_rows, width, dtype, data)


hidden_requests = st.none() | st.builds(
    m.HiddenStatesRequest,
    st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True).map(tuple),
    st.integers(-(2**40), 2**40),
)
auto_drafts = st.none() | st.builds(
    m.AutoDrafts,
    st.integers(1, 64),
    st.booleans(),
    st.lists(st.builds(m.DrafterOffer, names, st.integers(0, 99)), max_size=3).map(tuple),
    st.integers(0, 2**40),
)
last_drafts = st.none() | st.builds(m.LastDraft, st.integers(0, 2**40), st.integers(0, 2**40), st.booleans(), names)
commits = st.builds(
    m.Commit,
    epoch=lengths,
    base_len=lengths,
    token_ids=token_tuples,
    origins=st.lists(st.sampled_from(m.TokenOrigin), max_size=4).map(tuple),
    logprobs=logprobs,
    num_draft_tokens=st.integers(0, 99),
    num_accepted_tokens=st.integers(0, 99),
    finish_reason=st.none() | st.sampled_from(m.FinishReason),
    stop_token_id=st.none() | token_ids,
    timings=timings,
    hidden_states=st.none() | hidden_states(),
    more=st.booleans(),
    num_cached_tokens=st.integers(0, 2**20),
    prompt_logprobs=logprobs,
    next_draft=st.none() | st.builds(m.NextDraft, names, st.integers(1, 99), st.integers(0, 2**40)),
    saved_us=st.integers(-(2**40), 2**40),
)


@options
@given(sampling_params)
def test_sampling_params(params: SamplingParams) -> None:
    assert wire.params_from_wire(through_bytes(wire.params_to_wire(params))) == params


@options
@given(specs, names, st.none() | names)
def test_opening_a_session(spec: m.SessionSpec, method: str, numerics: str | None) -> None:
    for_verifier = dataclasses.replace(spec, numerics=numerics)
    assert wire.spec_from_wire(through_bytes(wire.open_verifier(for_verifier)).open) == for_verifier
    for_drafter = dataclasses.replace(spec, method=method)
    assert wire.spec_from_wire(through_bytes(wire.open_drafter(for_drafter)).open) == for_drafter


@options
@given(proposals())
def test_proposals(proposal: m.Proposal) -> None:
    assert wire.proposal_from_wire(through_bytes(wire.proposal_to_wire(proposal))) == proposal


@options
@given(
    st.builds(
        m.VerifyStep,
        lengths,
        lengths,
        st.none() | proposals(),
        st.integers(0, 2**20),
        hidden_requests,
        st.none(),
        auto_drafts,
        last_drafts,
    )
)
def test_verify_steps(step: m.VerifyStep) -> None:
    assert wire.verify_step_from_wire(through_bytes(wire.verify_step_to_wire(step)).step) == step


@options
@given(commits)
def test_commits(commit: m.Commit) -> None:
    assert wire.commit_from_wire(through_bytes(wire.commit_to_wire(commit))) == commit


@options
@given(
    st.builds(
        m.DraftStep,
        epoch=lengths,
        base_len=lengths,
        committed_token_ids=token_tuples,
        num_draft_tokens=st.integers(0, 99),
        hidden_states=st.lists(hidden_states(), max_size=2).map(tuple),
        max_tree_nodes=st.integers(0, 99),
        max_branches=st.integers(0, 99),
    )
)
def test_draft_steps(step: m.DraftStep) -> None:
    assert wire.draft_step_from_wire(through_bytes(wire.draft_step_to_wire(step)).step) == step


@options
@given(st.builds(m.ProposalReply, lengths, proposals(), timings, st.none() | lengths))
def test_proposal_replies(reply: m.ProposalReply) -> None:
    assert wire.proposal_reply_from_wire(through_bytes(wire.proposal_reply_to_wire(reply)).proposal) == reply


def test_infos() -> None:
    verifier = m.VerifierInfo(
        model="demo",
        version="1",
        vocab_size=4096,
        max_model_len=2048,
        eos_token_ids=(2, 7),
        dtype="bfloat16",
        device="cpu",
        hidden_size=64,
        num_hidden_layers=2,
        num_blocks=10,
        num_free_blocks=3,
        block_size=16,
        num_sessions=4,
        num_waiting=1,
        max_sessions=64,
        noise_version=1,
        certificate=m.RowInvarianceCertificate(
            False, "mlp", (m.CertificateCheck("one row", True, "fine"), m.CertificateCheck("tree", False))
        ),
        numerics="bfloat16/cpu/cpu/tp1/9f3a",
        num_state_slots=12,
        num_free_state_slots=5,
        round_us=(900, 1000, 1800),
        local_methods=(m.DraftMethodInfo("ngram"), m.DraftMethodInfo("eagle", "x", (1, 2), 8)),
    )
    assert wire.verifier_info_from_wire(through_bytes(wire.verifier_info_to_wire(verifier))) == verifier
    drafter = m.DrafterInfo("1", (m.DraftMethodInfo("eagle", "x", (1, 2), 8, True, 512, 99, True, 64),), 1, 2, 128)
    assert wire.drafter_info_from_wire(through_bytes(wire.drafter_info_to_wire(drafter))) == drafter


def law(tokens: list[int], counts: list[int]) -> common_pb2.SparseLaw:
    return common_pb2.SparseLaw(token_ids=tokens, counts=counts)


ALL = m.LAW_TOTAL


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": [1, 2], "parents": [-1]}, "parents"),
        ({"token_ids": [1, 2], "parents": [-1, 1]}, "parents"),
        ({"token_ids": [1, 2], "parents": [0, -1]}, "parents"),
        ({"token_ids": [1, 2], "parents": [-2, 0]}, "parents"),
        ({"token_ids": [1, 2], "confidence": b"1"}, "confidence"),
        ({"token_ids": [1, 2], "laws": [law([1], [ALL])], "law_total": ALL}, "laws"),
        ({"token_ids": [1], "laws": [law([1], [ALL])], "law_total": 0}, "law_total"),
        ({"token_ids": [1], "laws": [law([1], [1000])], "law_total": 1000}, "law_total"),
        ({"token_ids": [1], "laws": [law([1], [ALL - 1])], "law_total": ALL}, "laws"),
        ({"token_ids": [1], "laws": [law([1, 2], [ALL])], "law_total": ALL}, "laws"),
        ({"token_ids": [1], "laws": [law([1, 1], [ALL - 1, 1])], "law_total": ALL}, "laws"),
        ({"token_ids": [1], "laws": [law([1, 2], [ALL, 0])], "law_total": ALL}, "laws"),
        ({"token_ids": [1], "laws": [law([2], [ALL])], "law_total": ALL}, "laws"),
        ({"token_ids": [1], "laws": [law([], [])], "law_total": ALL}, "laws"),
    ],
)
def test_proposals_that_make_no_sense(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.proposal_from_wire(through_bytes(common_pb2.Proposal(**fields)))
    assert caught.value.param == param


def test_a_tree_with_laws() -> None:
    root, below = m.SparseLaw((1, 2, 5), (9, 7, ALL - 16)), m.SparseLaw((1,), (ALL,))
    proposal = m.Proposal(3, (1, 2, 1), "tree", parents=(-1, -1, 1), laws=(root, root, below))
    assert wire.proposal_from_wire(through_bytes(wire.proposal_to_wire(proposal))) == proposal


def test_sibling_laws_that_differ_are_refused() -> None:
    """Children of one node were drawn from one law; two laws would make the tree rule verify against the wrong one."""
    laws = [law([1, 2], [ALL - 1, 1]), law([1, 2], [1, ALL - 1])]
    message = common_pb2.Proposal(token_ids=[1, 2], parents=[-1, -1], laws=laws, law_total=ALL)
    with pytest.raises(InvalidRequest):
        wire.proposal_from_wire(through_bytes(message))


def test_the_same_sibling_twice_is_refused() -> None:
    laws = [law([1, 2], [ALL - 1, 1])] * 2
    message = common_pb2.Proposal(token_ids=[1, 1], parents=[-1, -1], laws=laws, law_total=ALL)
    with pytest.raises(InvalidRequest):
        wire.proposal_from_wire(through_bytes(message))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"session_id": ""}, "session_id"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"mode": 0}, "mode"),
        ({"mode": 77}, "mode"),
        ({"sampling_params": common_pb2.SamplingParams(temperature=-1)}, "temperature"),
        ({"sampling_params": common_pb2.SamplingParams(grammar=common_pb2.Grammar(text="x"))}, "grammar"),
    ],
)
@pytest.mark.parametrize("kind", [verifier_pb2.OpenVerifierSession, drafter_pb2.OpenDrafterSession])
def test_opens_that_make_no_sense(kind: Any, fields: dict[str, Any], param: str) -> None:
    good = {"session_id": "s", "prompt_token_ids": [1], "mode": common_pb2.SPECULATION_MODE_EXACT}
    wire.spec_from_wire(kind(**good))
    with pytest.raises(InvalidRequest) as caught:
        wire.spec_from_wire(through_bytes(kind(**{**good, **fields})))
    assert caught.value.param == param


class Walked(tuple[Any, ...]):
    """Counts how often its elements were gone through."""

    num_walks = 0

    def __iter__(self) -> Iterator[Any]:
        Walked.num_walks += 1
        return super().__iter__()


def test_a_requests_lists_are_built_and_read_once_for_all_its_outputs() -> None:
    """1,024 bad words took gateway and verifier 2 ms of each of their 17 outputs, thrice."""
    params = SamplingParams(bad_words=Walked([(1, 2), (3,)]), logit_bias=Walked([(5, 1.5), (4, -2.0)]))
    message = wire.params_to_wire(params)
    before = Walked.num_walks
    again = wire.params_to_wire(dataclasses.replace(params, seed=3))
    assert Walked.num_walks == before
    assert (again.bad_words, again.logit_bias) == (message.bad_words, message.logit_bias)
    first, second = wire.params_from_wire(message), wire.params_from_wire(again)
    assert first.bad_words is second.bad_words
    assert (first.bad_words, first.logit_bias) == (((1, 2), (3,)), ((4, -2.0), (5, 1.5)))


def test_absent_numbers_take_their_defaults_and_temperature_zero_stays_zero() -> None:
    params = wire.params_from_wire(common_pb2.SamplingParams())
    assert params == dataclasses.replace(SamplingParams(), temperature=0.0)


@pytest.mark.parametrize(
    "change", [{"dtype": "int8"}, {"num_rows": 2}, {"data": b"123"}, {"width": -1, "num_rows": -1}]
)
def test_hidden_states_that_do_not_fit_their_bytes(change: dict[str, Any]) -> None:
    good = m.HiddenStates(0, (3,), 1, 2, "float32", struct.pack("<2f", 1.0, 2.0))
    wire.hidden_from_wire(wire.hidden_to_wire(good))
    with pytest.raises(InvalidRequest):
        wire.hidden_from_wire(wire.hidden_to_wire(dataclasses.replace(good, **change)))


@pytest.mark.parametrize("fields", [{"base_len": -1}, {"max_new_tokens": -1}])
def test_negative_steps(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest):
        wire.verify_step_from_wire(verifier_pb2.VerifyStep(**fields))


@pytest.mark.parametrize(
    "auto",
    [
        {},
        {"max_num_draft_tokens": -1},
        {"max_num_draft_tokens": 65},
        {"max_num_draft_tokens": 4, "drafters": [verifier_pb2.LocalDrafts(method="ngram")] * 33},
    ],
    ids=str,
)
def test_what_auto_cannot_choose_from(auto: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="auto_drafts"):
        wire.verify_step_from_wire(verifier_pb2.VerifyStep(auto_drafts=verifier_pb2.AutoDrafts(**auto)))


def test_a_next_draft_of_no_tokens() -> None:
    with pytest.raises(InvalidRequest, match="next_draft"):
        wire.commit_from_wire(verifier_pb2.Commit(next_draft=verifier_pb2.NextDraft(method="ngram")))


@pytest.mark.parametrize("fields", [{"base_len": -1}, {"num_draft_tokens": -1}])
def test_negative_draft_steps(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest):
        wire.draft_step_from_wire(drafter_pb2.DraftStep(**fields))
