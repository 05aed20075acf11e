"""Protobuf in, plain values out, and back: the one place (with `rpc`) that knows the generated code.

A message that does not make sense raises InvalidRequest; whoever reads the stream ends that session, no other.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as drafter
from outrider.v1 import verifier_pb2 as verifier
from shared import messages as m
from shared.errors import InvalidRequest
from shared.sampling_params import Grammar, GrammarKind, SamplingParams, SpeculationMode

_MODE_TO_WIRE = {
    SpeculationMode.EXACT: common.SPECULATION_MODE_EXACT,
    SpeculationMode.REJECTION: common.SPECULATION_MODE_REJECTION,
}
_MODE_FROM_WIRE = {wire: mode for mode, wire in _MODE_TO_WIRE.items()}
_GRAMMAR_TO_WIRE = {
    GrammarKind.JSON_SCHEMA: common.Grammar.KIND_JSON_SCHEMA,
    GrammarKind.JSON_OBJECT: common.Grammar.KIND_JSON_OBJECT,
    GrammarKind.REGEX: common.Grammar.KIND_REGEX,
    GrammarKind.CHOICE: common.Grammar.KIND_CHOICE,
    GrammarKind.LARK: common.Grammar.KIND_LARK,
}
_GRAMMAR_FROM_WIRE = {wire: kind for kind, wire in _GRAMMAR_TO_WIRE.items()}


def mode_from_wire(mode: common.SpeculationMode.ValueType) -> SpeculationMode | None:
    return _MODE_FROM_WIRE.get(mode)


# ---- sampling parameters ----------------------------------------------------------------------------------------


def params_to_wire(params: SamplingParams) -> common.SamplingParams:
    message = common.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        bad_words=[common.TokenSequence(token_ids=word) for word in params.bad_words],
        allowed_token_ids=params.allowed_token_ids,
        num_logprobs=params.num_logprobs,
        num_prompt_logprobs=params.num_prompt_logprobs,
    )
    for token_id, bias in params.logit_bias:
        message.logit_bias[token_id] = bias
    if params.grammar is not None:
        message.grammar.kind = _GRAMMAR_TO_WIRE[params.grammar.kind]
        message.grammar.text = params.grammar.text
    return message


def params_from_wire(message: common.SamplingParams) -> SamplingParams:
    """Absent numbers whose default is not 0 take their default. Raises InvalidRequest on an unknown grammar."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed if message.HasField("seed") else None,
        max_tokens=message.max_tokens or SamplingParams.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        allowed_token_ids=tuple(message.allowed_token_ids),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        grammar=_grammar_from_wire(message.grammar) if message.HasField("grammar") else None,
    )


def _grammar_from_wire(message: common.Grammar) -> Grammar:
    if message.kind not in _GRAMMAR_FROM_WIRE:
        raise InvalidRequest(f"grammar: unknown kind {message.kind}", param="grammar")
    return Grammar(_GRAMMAR_FROM_WIRE[message.kind], message.text)


# ---- sessions ---------------------------------------------------------------------------------------------------


def open_verifier(spec: m.SessionSpec) -> verifier.VerifierRequest:
    return verifier.VerifierRequest(
        open=verifier.OpenVerifierSession(
            session_id=spec.session_id,
            epoch=spec.epoch,
            prompt_token_ids=spec.prompt_token_ids,
            committed_token_ids=spec.committed_token_ids,
            sampling_params=params_to_wire(spec.sampling_params),
            mode=_MODE_TO_WIRE[spec.mode],
            stream_key=spec.stream_key,
            cache_salt=spec.cache_salt,
            hidden_layers=spec.hidden_layers,
        )
    )


def open_drafter(spec: m.SessionSpec) -> drafter.DrafterRequest:
    return drafter.DrafterRequest(
        open=drafter.OpenDrafterSession(
            session_id=spec.session_id,
            epoch=spec.epoch,
            method=spec.method,
            prompt_token_ids=spec.prompt_token_ids,
            committed_token_ids=spec.committed_token_ids,
            sampling_params=params_to_wire(spec.sampling_params),
            mode=_MODE_TO_WIRE[spec.mode],
            stream_key=spec.stream_key,
            cache_salt=spec.cache_salt,
        )
    )


def spec_from_wire(message: verifier.OpenVerifierSession | drafter.OpenDrafterSession) -> m.SessionSpec:
    """Raises InvalidRequest when the id, the prompt or the mode is missing."""
    if not message.session_id:
        raise InvalidRequest("open: session_id is empty", param="session_id")
    if not message.prompt_token_ids:
        raise InvalidRequest("open: prompt_token_ids is empty", param="prompt_token_ids")
    mode = _MODE_FROM_WIRE.get(message.mode)
    if mode is None:
        raise InvalidRequest("open: mode must be EXACT or REJECTION", param="mode")
    params = params_from_wire(message.sampling_params)
    params.validate()
    return m.SessionSpec(
        session_id=message.session_id,
        epoch=message.epoch,
        prompt_token_ids=tuple(message.prompt_token_ids),
        committed_token_ids=tuple(message.committed_token_ids),
        sampling_params=params,
        mode=mode,
        stream_key=message.stream_key,
        cache_salt=message.cache_salt,
        hidden_layers=(tuple(message.hidden_layers) if isinstance(message, verifier.OpenVerifierSession) else ()),
        method=message.method if isinstance(message, drafter.OpenDrafterSession) else "",
    )


# ---- proposals --------------------------------------------------------------------------------------------------


def proposal_to_wire(proposal: m.Proposal) -> common.Proposal:
    return common.Proposal(
        base_len=proposal.base_len,
        token_ids=proposal.token_ids,
        parents=proposal.parents,
        laws=[common.SparseLaw(token_ids=law.token_ids, counts=law.counts) for law in proposal.laws],
        law_total=m.LAW_TOTAL if proposal.laws else 0,
        confidence=proposal.confidence,
        method=proposal.method,
    )


def proposal_from_wire(message: common.Proposal) -> m.Proposal:
    """Raises InvalidRequest when parents, laws or confidence do not fit the tokens."""
    num_tokens = len(message.token_ids)
    for name, values in (
        ("parents", message.parents),
        ("laws", message.laws),
        ("confidence", message.confidence),
    ):
        if len(values) not in (0, num_tokens):
            raise InvalidRequest(f"proposal: {len(values)} {name} for {num_tokens} tokens", param=name)
    for node, parent in enumerate(message.parents):
        if not -1 <= parent < node:
            raise InvalidRequest(f"proposal: node {node} has parent {parent}", param="parents")
    laws = tuple(_law_from_wire(law, message.law_total) for law in message.laws)
    for token_id, law in zip(message.token_ids, laws, strict=False):
        if token_id not in law.token_ids:
            raise InvalidRequest(f"proposal: token {token_id} has no mass in its own law", param="laws")
    if laws and message.parents:
        _check_siblings(message, laws)
    return m.Proposal(
        base_len=message.base_len,
        token_ids=tuple(message.token_ids),
        method=message.method,
        parents=tuple(message.parents),
        laws=laws,
        confidence=message.confidence,
    )


def _check_siblings(message: common.Proposal, laws: Sequence[m.SparseLaw]) -> None:
    """Children of one node are drawn without replacement from one law: what the tree rule stands on."""
    law_of_parent: dict[int, m.SparseLaw] = {}
    seen: set[tuple[int, int]] = set()
    for token_id, parent, law in zip(message.token_ids, message.parents, laws, strict=True):
        if law_of_parent.setdefault(parent, law) != law:
            raise InvalidRequest(f"proposal: the children of node {parent} have different laws", param="laws")
        if (parent, token_id) in seen:
            raise InvalidRequest(f"proposal: node {parent} has token {token_id} as a child twice", param="parents")
        seen.add((parent, token_id))


def _law_from_wire(law: common.SparseLaw, law_total: int) -> m.SparseLaw:
    if law_total != m.LAW_TOTAL:
        raise InvalidRequest(f"proposal: law_total is {law_total}, not {m.LAW_TOTAL}", param="law_total")
    if len(law.token_ids) != len(law.counts) or sum(law.counts) != law_total:
        raise InvalidRequest("proposal: a law's counts do not sum to law_total", param="laws")
    if len(set(law.token_ids)) != len(law.token_ids) or 0 in law.counts:
        raise InvalidRequest("proposal: a law names a token twice or with no mass", param="laws")
    return m.SparseLaw(tuple(law.token_ids), tuple(law.counts))


def hidden_to_wire(hidden: m.HiddenStates) -> common.HiddenStates:
    return common.HiddenStates(
        first_index=hidden.first_index,
        layers=hidden.layers,
        num_rows=hidden.num_rows,
        width=hidden.width,
        dtype=hidden.dtype,
        data=hidden.data,
    )


_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def hidden_from_wire(message: common.HiddenStates) -> m.HiddenStates:
    """Raises InvalidRequest when the bytes do not fit the shape."""
    item_bytes = _DTYPE_BYTES.get(message.dtype)
    if item_bytes is None:
        raise InvalidRequest(f"hidden_states: unknown dtype {message.dtype!r}", param="hidden_states")
    expected = len(message.layers) * message.num_rows * message.width * item_bytes
    if message.num_rows < 0 or message.width < 0 or len(message.data) != expected:
        raise InvalidRequest(
            f"hidden_states: {len(message.data)} bytes where the shape needs {expected}",
            param="hidden_states",
        )
    return m.HiddenStates(
        first_index=message.first_index,
        layers=tuple(message.layers),
        num_rows=message.num_rows,
        width=message.width,
        dtype=message.dtype,
        data=message.data,
    )


def _timings_to_wire(timings: m.Timings) -> common.Timings:
    return common.Timings(
        queue_us=timings.queue_us,
        forward_us=timings.forward_us,
        total_us=timings.total_us,
        sample_us=timings.sample_us,
    )


def _timings_from_wire(message: common.Timings) -> m.Timings:
    return m.Timings(message.queue_us, message.forward_us, message.total_us, message.sample_us)


# ---- verifier ---------------------------------------------------------------------------------------------------


def verify_step_to_wire(step: m.VerifyStep) -> verifier.VerifierRequest:
    return verifier.VerifierRequest(
        step=verifier.VerifyStep(
            epoch=step.epoch,
            base_len=step.base_len,
            proposal=proposal_to_wire(step.proposal) if step.proposal is not None else None,
            max_new_tokens=step.max_new_tokens,
        )
    )


def verify_step_from_wire(message: verifier.VerifyStep) -> m.VerifyStep:
    if message.base_len < 0 or message.max_new_tokens < 0:
        raise InvalidRequest("step: base_len and max_new_tokens must not be negative", param="base_len")
    return m.VerifyStep(
        epoch=message.epoch,
        base_len=message.base_len,
        proposal=proposal_from_wire(message.proposal) if message.HasField("proposal") else None,
        max_new_tokens=message.max_new_tokens,
    )


def _logprobs_to_wire(logprobs: Sequence[m.TokenLogprob]) -> list[common.TokenLogprob]:
    return [
        common.TokenLogprob(
            logprob=entry.logprob,
            rank=entry.rank,
            top_token_ids=entry.top_token_ids,
            top_logprobs=entry.top_logprobs,
        )
        for entry in logprobs
    ]


def _logprobs_from_wire(logprobs: Sequence[common.TokenLogprob]) -> tuple[m.TokenLogprob, ...]:
    return tuple(
        m.TokenLogprob(entry.logprob, entry.rank, tuple(entry.top_token_ids), tuple(entry.top_logprobs))
        for entry in logprobs
    )


def commit_to_wire(commit: m.Commit) -> verifier.Commit:
    return verifier.Commit(
        epoch=commit.epoch,
        base_len=commit.base_len,
        token_ids=commit.token_ids,
        origins=[common.TokenOrigin.ValueType(origin) for origin in commit.origins],
        logprobs=_logprobs_to_wire(commit.logprobs),
        num_draft_tokens=commit.num_draft_tokens,
        num_accepted_tokens=commit.num_accepted_tokens,
        finish_reason=common.FinishReason.ValueType(commit.finish_reason or 0),
        stop_token_id=commit.stop_token_id,
        timings=_timings_to_wire(commit.timings),
        hidden_states=hidden_to_wire(commit.hidden_states) if commit.hidden_states is not None else None,
        more=commit.more,
        num_cached_tokens=commit.num_cached_tokens,
        prompt_logprobs=_logprobs_to_wire(commit.prompt_logprobs),
    )


def commit_from_wire(message: verifier.Commit) -> m.Commit:
    return m.Commit(
        epoch=message.epoch,
        base_len=message.base_len,
        token_ids=tuple(message.token_ids),
        origins=tuple(m.TokenOrigin(origin) for origin in message.origins),
        logprobs=_logprobs_from_wire(message.logprobs),
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        finish_reason=m.FinishReason(message.finish_reason) if message.finish_reason else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        timings=_timings_from_wire(message.timings),
        hidden_states=(hidden_from_wire(message.hidden_states) if message.HasField("hidden_states") else None),
        more=message.more,
        num_cached_tokens=message.num_cached_tokens,
        prompt_logprobs=_logprobs_from_wire(message.prompt_logprobs),
    )


def verifier_info_to_wire(info: m.VerifierInfo) -> verifier.VerifierInfo:
    return verifier.VerifierInfo(
        model=info.model,
        version=info.version,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        dtype=info.dtype,
        device=info.device,
        hidden_size=info.hidden_size,
        num_hidden_layers=info.num_hidden_layers,
        num_blocks=info.num_blocks,
        num_free_blocks=info.num_free_blocks,
        block_size=info.block_size,
        num_sessions=info.num_sessions,
        num_waiting=info.num_waiting,
        max_sessions=info.max_sessions,
        noise_version=info.noise_version,
        certificate=verifier.RowInvarianceCertificate(
            holds=info.certificate_holds,
            failing_operation=info.failing_operation,
            checks=[
                verifier.CertificateCheck(name=check.name, holds=check.holds, detail=check.detail)
                for check in info.certificate_checks
            ],
        ),
    )


def verifier_info_from_wire(message: verifier.VerifierInfo) -> m.VerifierInfo:
    return m.VerifierInfo(
        model=message.model,
        version=message.version,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        dtype=message.dtype,
        device=message.device,
        hidden_size=message.hidden_size,
        num_hidden_layers=message.num_hidden_layers,
        num_blocks=message.num_blocks,
        num_free_blocks=message.num_free_blocks,
        block_size=message.block_size,
        num_sessions=message.num_sessions,
        num_waiting=message.num_waiting,
        max_sessions=message.max_sessions,
        noise_version=message.noise_version,
        certificate_holds=message.certificate.holds,
        failing_operation=message.certificate.failing_operation,
        certificate_checks=tuple(
            m.CertificateCheck(check.name, check.holds, check.detail) for check in message.certificate.checks
        ),
    )


# ---- drafter ----------------------------------------------------------------------------------------------------


def draft_step_to_wire(step: m.DraftStep) -> drafter.DrafterRequest:
    return drafter.DrafterRequest(
        step=drafter.DraftStep(
            epoch=step.epoch,
            base_len=step.base_len,
            committed_token_ids=step.committed_token_ids,
            num_draft_tokens=step.num_draft_tokens,
            hidden_states=hidden_to_wire(step.hidden_states) if step.hidden_states is not None else None,
            max_tree_nodes=step.max_tree_nodes,
            max_branches=step.max_branches,
        )
    )


def draft_step_from_wire(message: drafter.DraftStep) -> m.DraftStep:
    if message.base_len < 0 or message.num_draft_tokens < 0:
        raise InvalidRequest("step: base_len and num_draft_tokens must not be negative", param="base_len")
    return m.DraftStep(
        epoch=message.epoch,
        base_len=message.base_len,
        committed_token_ids=tuple(message.committed_token_ids),
        num_draft_tokens=message.num_draft_tokens,
        hidden_states=(hidden_from_wire(message.hidden_states) if message.HasField("hidden_states") else None),
        max_tree_nodes=message.max_tree_nodes,
        max_branches=message.max_branches,
    )


def proposal_reply_to_wire(reply: m.ProposalReply) -> drafter.DrafterReply:
    return drafter.DrafterReply(
        proposal=drafter.ProposalReply(
            epoch=reply.epoch,
            proposal=proposal_to_wire(reply.proposal),
            timings=_timings_to_wire(reply.timings),
            missing_hidden_from=reply.missing_hidden_from,
        )
    )


def proposal_reply_from_wire(message: drafter.ProposalReply) -> m.ProposalReply:
    return m.ProposalReply(
        epoch=message.epoch,
        proposal=proposal_from_wire(message.proposal),
        timings=_timings_from_wire(message.timings),
        missing_hidden_from=message.missing_hidden_from if message.HasField("missing_hidden_from") else None,
    )


def drafter_info_to_wire(info: m.DrafterInfo) -> drafter.DrafterInfo:
    return drafter.DrafterInfo(
        version=info.version,
        methods=[
            drafter.DraftMethodInfo(
                name=method.name,
                model=method.model,
                hidden_layers=method.hidden_layers,
                max_num_draft_tokens=method.max_num_draft_tokens,
                proposes_trees=method.proposes_trees,
                max_model_len=method.max_model_len,
                vocab_size=method.vocab_size,
            )
            for method in info.methods
        ],
        noise_version=info.noise_version,
        num_sessions=info.num_sessions,
        max_sessions=info.max_sessions,
    )


def drafter_info_from_wire(message: drafter.DrafterInfo) -> m.DrafterInfo:
    return m.DrafterInfo(
        version=message.version,
        methods=tuple(
            m.DraftMethodInfo(
                name=method.name,
                model=method.model,
                hidden_layers=tuple(method.hidden_layers),
                max_num_draft_tokens=method.max_num_draft_tokens,
                proposes_trees=method.proposes_trees,
                max_model_len=method.max_model_len,
                vocab_size=method.vocab_size,
            )
            for method in message.methods
        ),
        noise_version=message.noise_version,
        num_sessions=message.num_sessions,
        max_sessions=message.max_sessions,
    )
