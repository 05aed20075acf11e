"""Reported log-probabilities: those of greedy and sampled answers equal the teacher-forced ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .answers import Answer, Law
from .greedy import margin, tolerance
from .session import Session
from .verdicts import Verdict

# total variation over the listed tokens; above: another law, not rounding
_OTHER_LAW = 0.15
_ROUNDING = 0.03
# places of each law whose figures measure the server's rounding
_NOISE_PLACES = 5


def check_logprobs(session: Session) -> None:
    if session.abilities.list_size < 2 or not session.can_force:
        session.record("logprobs", Verdict.NOT_TESTED, "needs lists, token ids, and prompts of token ids")
        return
    size, length = session.abilities.list_size, session.options.greedy_tokens
    forced = [session.forced_laws(*_asked(session, answer)) for answer in session.greedy_answers]
    _check_lists(session, "logprobs: greedy answers", session.greedy_answers, forced)
    _check_argmax(session, forced)
    if session.abilities.lists == "raw":
        sampled = [session.ask(p, max_tokens=length, temperature=1.0, logprobs=size) for p in session.prompts]
        forced = [session.forced_laws(*_asked(session, answer)) for answer in sampled]
        _check_lists(session, "logprobs: sampled answers", sampled, forced)


def _asked(session: Session, answer: Answer) -> tuple[Sequence[int], Sequence[int], Sequence[int] | None]:
    return answer.request["prompt"], answer.ids, session.places(session.options.greedy_tokens)


def total_variation(one: Law, other: Law) -> float:
    """Half the sum of |difference| over the tokens of both lists; 1 without any."""
    first, second = dict(one), dict(other)
    common = [key for key in first if key in second]
    if not common:
        return 1.0
    return 0.5 * sum(abs(math.exp(first[key]) - math.exp(second[key])) for key in common)


def _check_lists(session: Session, test: str, answers: Sequence[Answer], forced: Sequence[dict[int, Law]]) -> None:
    count, missing, worst = 0, 0, 0.0
    for answer, laws in zip(answers, forced, strict=True):
        failed = False
        for place, law in laws.items():
            reported = answer.tokens[place].law if place < len(answer.tokens) else ()
            count += 1
            if len(reported) < 2:
                missing, failed = missing + 1, True
                continue
            told = dict(reported)
            session.figure_noise += [abs(value - told[key]) for key, value in law[:_NOISE_PLACES] if key in told]
            distance = total_variation(law, reported)
            worst, failed = max(worst, distance), failed or distance > _OTHER_LAW
        if failed:
            session.keep(test, "at every token the same list as prompt_logprobs of prompt and answer", answer)
    bad = missing or worst > _OTHER_LAW
    verdict = Verdict.NOT_TESTED if not count else Verdict.FAIL if bad else Verdict.PASS
    if verdict is Verdict.PASS and worst > _ROUNDING:
        verdict = Verdict.NOTE
    told_of = f"{count} positions, {missing} without a list; total variation from teacher forcing at most {worst:.4f}"
    session.record(test, verdict, told_of, total_variation=worst, missing=missing)


def _check_argmax(session: Session, forced: Sequence[dict[int, Law]]) -> None:
    test = "greedy: argmax of the teacher-forced law"
    count, wrong, near, allowed = 0, 0, 0, tolerance(session)
    for answer, laws in zip(session.greedy_answers, forced, strict=True):
        missed = [margin(dict(law), answer.ids[place]) for place, law in laws.items()]
        count += len(missed)
        near += sum(0 < value <= allowed for value in missed)
        if bad := sum(value > allowed for value in missed):
            wrong += bad
            session.keep(test, "each token the most likely one behind those before it", answer)
    verdict = Verdict.FAIL if wrong else Verdict.DIFFERS if near else Verdict.PASS
    session.record(test, verdict, f"{count} tokens, {wrong} wrong, {near} near ties (up to {allowed:.3f} nats)")
