"""The parsers behind the servers, in process: a value comes out, or an error of ours (shared/errors.py). Nothing else.

Not here: checkpoints (checkpoint_files.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st

from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.gateway.openai.convert import prepare_chat, prepare_completion
from outrider.gateway.openai.schema import ChatCompletionRequest, CompletionRequest, parse_body
from outrider.gateway.request.commit_sink import commit_of
from outrider.gateway.request.event_cursor import parse_event_id
from outrider.gateway.request.record import SessionRecord
from outrider.gateway.request.served import RequestLimits, Served, ServedModel
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.servers.http.limits import parse_json
from outrider.shared import wire
from outrider.shared.errors import InternalError, InvalidRequest, Unavailable
from outrider.shared.log.commit_log import LogEntry
from outrider.shared.sampling_params import Grammar, GrammarKind
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as drafter
from outrider.v1 import log_pb2 as log
from outrider.v1 import verifier_pb2 as verifier
from tests.fuzz.campaign import Target
from tests.fuzz.rest_server import GOOD_BODIES, changed_body
from tests.fuzz.strange_bytes import corrupted
from tests.fuzz.strange_protobuf import strange
from tests.fuzz.victim import MODELS

_MODEL = MODELS / "demo-target"
# What a peer or a caller is told is wrong with what it sent; a record's reader says InternalError or Unavailable.
_REFUSALS = (InvalidRequest, InternalError, Unavailable, DecodeError)


def parser_targets() -> list[Target[Any]]:
    return [*_wire_targets(), *_log_targets(), *_http_targets(), *_grammar_targets()]


def _target(name: str, inputs: st.SearchStrategy[Any], parse: Callable[[Any], object]) -> Target[Any]:
    def check(one: Any) -> list[str]:
        try:
            parse(one)
        except _REFUSALS as refusal:
            return [type(refusal).__name__]
        return ["parsed"]

    return Target(f"parser {name}", inputs, check)


def _message_target(kind: type[Message], parse: Callable[[Any], object]) -> Target[Any]:
    whole = strange(kind).map(lambda message: message.SerializeToString())
    inputs = whole | corrupted(whole) | st.binary(max_size=40)
    return _target(kind.DESCRIPTOR.name, inputs, lambda data: parse(kind.FromString(data)))


def _wire_targets() -> list[Target[Any]]:
    return [
        _message_target(verifier.OpenVerifierSession, wire.spec_from_wire),
        _message_target(drafter.OpenDrafterSession, wire.spec_from_wire),
        _message_target(common.SamplingParams, lambda message: wire.params_from_wire(message).validate(4096)),
        _message_target(verifier.VerifyStep, wire.verify_step_from_wire),
        _message_target(drafter.DraftStep, wire.draft_step_from_wire),
        _message_target(common.Proposal, wire.proposal_from_wire),
        _message_target(common.HiddenStates, wire.hidden_from_wire),
        _message_target(verifier.Commit, wire.commit_from_wire),
        _message_target(drafter.ProposalReply, wire.proposal_reply_from_wire),
        _message_target(verifier.VerifierInfo, wire.verifier_info_from_wire),
        _message_target(drafter.DrafterInfo, wire.drafter_info_from_wire),
    ]


def _log_targets() -> list[Target[Any]]:
    def entry(message: log.CommitExtras) -> object:
        return commit_of(LogEntry(0, (5,), message.num_draft_tokens & 7, 0, message.SerializeToString()))

    return [
        # With the version that is read, or every other record would end at its first field.
        _message_target(log.SessionRecord, lambda message: SessionRecord.decode(_versioned(message))),
        _message_target(log.CommitExtras, entry),
        _target("Last-Event-ID", st.from_regex(r"[a-z]{0,4}:?[-0-9f.$:]{0,24}") | st.text(max_size=20), parse_event_id),
    ]


def _versioned(message: log.SessionRecord) -> bytes:
    message.version = 1
    return message.SerializeToString()


def _http_targets() -> list[Target[Any]]:
    model = ServedModel("demo-target", max_model_len=2048, vocab_size=4096, draft_methods=("draft_model", "ngram"))
    served = Served(model, Tokenizer.load(str(_MODEL)), RequestLimits())

    def completion(body: bytes) -> object:
        return prepare_completion(parse_body(CompletionRequest, parse_json(body)), served)

    def chat(body: bytes) -> object:
        return prepare_chat(parse_body(ChatCompletionRequest, parse_json(body)), served)

    return [
        _target("/v1/completions", changed_body(GOOD_BODIES["/v1/completions"]), completion),
        _target("/v1/chat/completions", changed_body(GOOD_BODIES["/v1/chat/completions"]), chat),
    ]


_ATOMS = (
    "a",
    ".",
    "[a-z]",
    r"\d",
    "(",
    ")",
    "|",
    "*",
    "+",
    "?",
    "{2,3}",
    "{9999}",
    "[^",
    "]",
    "\\",
    "(?i)",
    "(?=a)",
    "^",
    "$",
    "\x00",
    "é",
)
_LARK = (
    "start: ",
    "x",
    " | ",
    '"a"',
    "/b+/",
    "\n",
    "x: ",
    "start",
    "%json {}",
    "(",
    ")",
    "+",
    "?",
    "~3",
    "%ignore /x/",
    "[",
    "]",
)
_SCHEMA_KEYS = st.sampled_from(
    [
        *(
            "type",
            "properties",
            "items",
            "enum",
            "const",
            "anyOf",
            "allOf",
            "oneOf",
            "$ref",
            "$defs",
            "pattern",
            "format",
        ),
        *("minimum", "maximum", "minLength", "maxLength", "minItems", "required", "additionalProperties", "not", "x"),
    ]
)
_SCHEMA_LEAVES = st.one_of(
    st.sampled_from(
        ["object", "string", "integer", "array", "#", "#/$defs/x", "a+", "date-time", True, None, 0, 5, -1, 1e9]
    ),
    st.integers(),
    st.text(max_size=6),
)
_SCHEMAS = st.recursive(
    _SCHEMA_LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_SCHEMA_KEYS, inner, max_size=4),
    max_leaves=10,
)


def _grammar_targets() -> list[Target[Any]]:
    eos_token_ids = json.loads((_MODEL / "config.json").read_text())["eos_token_id"]
    compiler = GrammarCompiler(str(_MODEL), 4096, eos_token_ids)

    def compile_and_ask(grammar: Grammar) -> None:
        compiler.compile(grammar).allowed([])

    def of(kind: GrammarKind, texts: st.SearchStrategy[str]) -> Target[Any]:
        return _target(f"grammar {kind.value}", texts.map(lambda text: Grammar(kind, text)), compile_and_ask)

    def joined(words: tuple[str, ...]) -> st.SearchStrategy[str]:
        return st.lists(st.sampled_from(words), max_size=12).map("".join)

    text = st.text(max_size=12)
    return [
        of(GrammarKind.REGEX, joined(_ATOMS) | text),
        of(GrammarKind.LARK, joined(_LARK).map(lambda text: "start: " + text) | joined(_LARK) | text),
        of(GrammarKind.JSON_SCHEMA, st.dictionaries(_SCHEMA_KEYS, _SCHEMAS, max_size=4).map(json.dumps) | text),
        of(GrammarKind.CHOICE, st.lists(text, max_size=4).map(json.dumps) | _SCHEMAS.map(json.dumps) | text),
    ]
