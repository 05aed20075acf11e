"""Usage counts: the tokens that a server counts are those that it sends."""

from __future__ import annotations

from .session import Session
from .verdicts import Verdict


def check_usage(session: Session) -> None:
    test = "usage: counted = sent"
    counted = [a for a in session.greedy_answers if a.ids and a.usage.get("completion_tokens") is not None]
    if not counted:
        session.record(test, Verdict.NOT_TESTED, "needs token ids and usage")
        return
    sampled = [session.ask(p, max_tokens=23, temperature=1.0) for p in session.prompts]
    bad = []
    for answer in (*counted, *sampled):
        prompt = answer.request["prompt"]
        wrong_prompt = not isinstance(prompt, str) and answer.usage.get("prompt_tokens") != len(prompt)
        if wrong_prompt or answer.usage.get("completion_tokens") != len(answer.ids):
            bad.append(answer)
            session.keep(test, "usage equal to the tokens sent", answer)
    told = f"{len(counted) + len(sampled)} answers, {len(bad)} with other counts"
    session.record(test, Verdict.FAIL if bad else Verdict.PASS, told)
