"""Greedy answers: equal bytes alone, repeated, streamed, in a crowd, for n choices, and without drafts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from .answers import Answer, ServerError
from .session import CROWD_WIDTH, Session
from .verdicts import Verdict

# nats; a near tie is at most max(floor, 3 x the 99 % quantile of the server's own differences), and the cap
_TIE_FLOOR = 0.02
_TIE_CAP = 0.5
_TIE_WITHOUT_FIGURES = 0.06
_MIN_FIGURES = 20


def tolerance(session: Session) -> float:
    """nats by which the maximum of a law may be missed through rounding."""
    noise = sorted(session.figure_noise)
    measured = 3 * noise[int(0.99 * (len(noise) - 1))] if len(noise) > _MIN_FIGURES else _TIE_WITHOUT_FIGURES
    return min(_TIE_CAP, max(_TIE_FLOOR, measured))


def margin(law: dict[str, float], token_id: int) -> float:
    """nats from the law's maximum to the token; for one outside of the list, at least to its end."""
    return max(law.values()) - law.get(f"token_id:{token_id}", min(law.values()) - 0.1)


def compare(session: Session, base: Answer, other: Answer) -> tuple[str, float]:
    """same | near tie | wrong ... | unknown, and the margin in nats at the first different token."""
    if not base.ids or not other.ids:
        return ("same", 0.0) if base.text == other.text else ("unknown", math.nan)
    if len(base.ids) != len(other.ids) and base.text == other.text:
        return "same", 0.0  # not every event of a stream names its tokens (llama.cpp: none of an accepted draft)
    shorter, longer = sorted((base, other), key=lambda answer: len(answer.ids))
    place = next((i for i, token in enumerate(shorter.ids) if token != longer.ids[i]), len(shorter.ids))
    both_end = shorter.finish == longer.finish == "stop"
    if place == len(longer.ids) or (both_end and place == len(shorter.ids) == len(longer.ids) - 1):
        # Streams may leave out a character that max_tokens cut, and some answers the id of the token that ends them.
        return ("same", 0.0) if _whole(base.text) == _whole(other.text) else ("wrong text", math.nan)
    if place == len(shorter.ids) and shorter.finish != "stop":
        return "wrong length", math.nan
    law = dict(session.forced_laws(base.request["prompt"], longer.ids, [place]).get(place, ()))
    if len(law) < 2:
        return "unknown", math.nan
    missed = margin(law, longer.ids[place])
    if place < len(shorter.ids):
        missed = max(missed, margin(law, shorter.ids[place]))
    elif missed == 0:  # the other one is the token that ends a text: not the first, so at best the second
        missed = sorted(law.values())[-1] - sorted(law.values())[-2]
    return ("near tie" if missed <= tolerance(session) else "wrong"), missed


def _whole(text: str) -> str:
    return text.rstrip("\ufffd")


def check_greedy(session: Session) -> None:
    """Uses the session's greedy answers, which the test of logprobs asks for."""
    base, prompts = session.greedy_answers, session.prompts
    length = session.options.greedy_tokens
    size = session.abilities.list_size or None

    def again(**fields: object) -> list[Answer]:
        return [session.ask(p, **{"max_tokens": length, "temperature": 0, **fields}) for p in prompts]

    _record(session, "repeated", base, again(logprobs=size))
    _record(session, "without logprobs", base, again())
    _record(session, "streamed", base, again(stream=True))
    if session.has_reference:
        off = [session.ask_reference(p, max_tokens=length, temperature=0, logprobs=size) for p in prompts]
        _record(session, "against the reference", base, off)
    _crowd(session, base)
    _record(session, "after others", base, again(stream=True, logprobs=size))
    if "n" in session.abilities.accepted:
        bodies = [session.body(p, max_tokens=length, temperature=0, n=3) for p in prompts]
        choices = session.ask_all(bodies, 4)
        _record(session, "n = 3", [b for b in base for _ in range(3)], [a for answers in choices for a in answers])


def check_top_k_one(session: Session) -> None:
    """top_k = 1 at T = 1 is greedy. A dangerous field: it runs last."""
    base = session.greedy_answers
    if "top_k" not in session.abilities.neutral:
        session.record("greedy: top_k = 1 at T = 1", Verdict.NOT_TESTED, "top_k is refused or skipped")
        return
    length = session.options.greedy_tokens
    answers = [session.ask(p, max_tokens=length, temperature=1.0, top_k=1) for p in session.prompts]
    _record(session, "top_k = 1 at T = 1", base, answers)


def _crowd(session: Session, base: list[Answer]) -> None:
    """Asks each prompt three times among sampled requests of other lengths: greedy among greedy hides defects."""
    length, size = session.options.greedy_tokens, session.abilities.list_size or None
    greedy = [session.body(p, max_tokens=length, temperature=0) for p in session.prompts] * 3
    sampled = [session.body(p, max_tokens=length - 8, temperature=1.0, logprobs=size) for p in session.prompts]
    bodies = [*greedy, *sampled]
    order = list(range(len(bodies)))
    session.random.shuffle(order)
    answers = session.ask_all([bodies[i] for i in order], CROWD_WIDTH)
    of_greedy = {i: a[0] for i, a in zip(order, answers, strict=True) if i < len(greedy)}
    beside = [a[0] for i, a in zip(order, answers, strict=True) if i >= len(greedy)]
    name = f"beside sampled requests, {CROWD_WIDTH} at once"
    _record(session, name, base * 3, [of_greedy[i] for i in range(len(greedy))], beside)


def _record(
    session: Session, name: str, base: Sequence[Answer], others: Sequence[Answer], beside: Sequence[Answer] = ()
) -> None:
    test = f"greedy: {name}"
    kinds: Counter[str] = Counter()
    worst = 0.0
    for one, other in zip(base, others, strict=True):
        kind, missed = compare(session, one, other)
        kinds[kind] += 1
        worst = max(worst, 0.0 if math.isnan(missed) else missed)
        if kind.startswith("wrong"):
            session.keep(test, "the same answer from the first two requests", one, other, *beside, at_once=bool(beside))
    broken = any(kind.startswith("wrong") for kind in kinds)
    unclear = kinds["near tie"] + kinds["unknown"]
    verdict = Verdict.FAIL if broken else Verdict.DIFFERS if unclear else Verdict.PASS
    told = f"of {len(base)} answers: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    session.record(test, verdict, told + (f"; largest margin {worst:.3f} nats" if worst else ""), margin=worst)


def ask_greedy(session: Session) -> None:
    """The answers that all others are compared with. Raises ServerError."""
    size = session.abilities.list_size or None
    for prompt in session.prompts:
        answer = session.ask(prompt, max_tokens=session.options.greedy_tokens, temperature=0, logprobs=size)
        if not answer.text and not answer.ids:
            raise ServerError(400, "an empty greedy answer", answer.request)
        session.greedy_answers.append(answer)
