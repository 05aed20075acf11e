"""Sessions whose masks take long do not make the others' rounds long. The masks' clock is given here."""

from __future__ import annotations

import itertools
import math
import statistics
from contextlib import ExitStack

import tokenizers
from llguidance import LLMatcher, LLTokenizer
from tokenizers import decoders, models

from outrider.engine.sampling.grammar import GrammarState
from outrider.shared.messages import Commit
from outrider.shared.sampling_params import SamplingParams
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.session import VerifierSession
from outrider.verifier_service.timing.mask_turns import MaskTurns
from tests.verifier_service.engine_client import EOS_ID, PROMPT, VOCAB_SIZE, Session, make_spec
from tests.verifier_service.test_field_pairs import IDS
from tests.verifier_service.test_scheduler import ask, make_session

NUM_DEAR = 8
# seconds; of each mask, just within the limit of a session's mean
MASK_S = 0.0045
LONG = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)


def dear_grammar() -> GrammarState:
    backend = tokenizers.Tokenizer(models.BPE(vocab=IDS, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = LLTokenizer(backend.to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS_ID])
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex("[a-z]*"), log_level=0)
    now = itertools.count(0.0, MASK_S)
    return GrammarState(matcher, VOCAB_SIZE, lambda _token_id: b"", clock=lambda: next(now))


class Dear(Session):
    """A session whose grammar takes MASK_S a token."""

    def __enter__(self) -> Session:
        self.handle = self.engine.open(self.spec, self.replies.put, dear_grammar())
        return self


def run_beside(engine: VerifierEngine, specs: int, last: Session) -> list[Commit]:
    """The last session's commits, of a run beside sessions with dear masks that have begun."""
    with ExitStack() as stack:
        for index in range(specs):
            session = stack.enter_context(Dear(engine, make_spec((*PROMPT, index), LONG)))
            session.submit(0, max_new_tokens=LONG.max_tokens)
            assert isinstance(session.replies.get(timeout=60.0), Commit)
        return stack.enter_context(last).step(0, max_new_tokens=40)


def batch_sizes(commits: list[Commit]) -> list[int]:
    return [commit.timings.batch_sessions for commit in commits]


def test_masks_take_as_long_as_forwards_while_others_decode(engine: VerifierEngine) -> None:
    commits = run_beside(engine, NUM_DEAR, Session(engine, make_spec(PROMPT, LONG)))
    assert statistics.median(batch_sizes(commits)) <= 1 + NUM_DEAR / 2
    assert max(batch_sizes(commits)) > 1, "they wait for ever"


def test_where_all_have_grammars_none_sits_out(engine: VerifierEngine) -> None:
    commits = run_beside(engine, NUM_DEAR - 1, Dear(engine, make_spec(PROMPT, LONG)))
    assert statistics.median(batch_sizes(commits)) == NUM_DEAR


def dear_session(opened_at: float, arrived_at: float) -> VerifierSession:
    session = make_session(opened_at)
    session.processor.grammar = dear_grammar()
    session.mask_s = MASK_S
    ask(session, at=arrived_at)
    return session


def test_they_take_turns() -> None:
    """Each forward of 10 ms leaves room for two masks of 4.5 ms; those that have waited for longest go first."""
    plain, dear = make_session(0), [dear_session(1 + index, index) for index in range(5)]
    ask(plain)
    turns, ran = MaskTurns(), []
    for now in range(5, 10):
        turns.observe([], 0.010)
        turns.choose([plain, *dear])
        assert not plain.sits_out
        chosen = [session for session in dear if session.is_ready]
        for session in chosen:
            session.step_arrived_at = now
        ran.append([int(session.opened_at) for session in chosen])
    assert ran == [[1, 2], [3, 4], [1, 5], [2, 3], [1, 4]]


def test_nobody_sits_out_where_nothing_fits_or_nobody_else_waits() -> None:
    plain, dear = make_session(0), [dear_session(1, 0.0), dear_session(2, 1.0)]
    turns = MaskTurns()
    turns.choose([plain, *dear])
    assert [session.sits_out for session in dear] == [False, True], "one goes on while the plain one is away"
    ask(plain)
    turns.choose([plain, *dear])
    assert [session.sits_out for session in dear] == [True, True]
    turns.observe([], math.inf)
    turns.choose([plain, *dear])
    assert not any(session.sits_out for session in dear)
