"""Fields of a request that speculation gets wrong: limits, stop strings, biases, penalties, seeds; usage counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from .answers import Answer
from .greedy import tolerance
from .session import CROWD_WIDTH, Session
from .verdicts import Verdict

_LIMITS = (1, 2, 3, 4, 5, 7, 10, 13)
_MIN_TOKENS = 24
_SEED, _OTHER_SEED = 1234, 77
# Negative ones make tokens repeat at once, so that counts which are a round old show.
_PENALTIES = (
    {"presence_penalty": 0.5, "frequency_penalty": 1.0},
    {"presence_penalty": -1.0, "frequency_penalty": -1.0},
)


def check_fields(session: Session) -> None:
    _max_tokens(session)
    _stop_strings(session)
    _seeds(session)
    _choices(session)
    common = [t for t, _ in Counter(t for a in session.greedy_answers for t in a.ids).most_common(3)]
    for name, needs, test in (
        ("logit_bias of 100 and -100", ("logit_bias",), _bias),
        ("min_tokens with stop_token_ids", ("min_tokens", "stop_token_ids"), _min_tokens),
    ):
        _if_accepted(session, name, needs, common, test)
    _penalties(session)


def _if_accepted(
    session: Session, name: str, needs: tuple[str, ...], common: list[int], test: Callable[[Session, list[int]], None]
) -> None:
    refused = [field for field in needs if field not in session.abilities.accepted]
    if refused or not common:
        why = f"refused by the server: {', '.join(refused)}" if refused else "answers without token ids"
        session.record(f"fields: {name}", Verdict.NOT_TESTED, why)
    else:
        test(session, common)


def _verdict(session: Session, test: str, bad: list[Answer], count: int, expected: str) -> None:
    for answer in bad:
        session.keep(test, expected, answer)
    session.record(test, Verdict.FAIL if bad else Verdict.PASS, f"{count - len(bad)} of {count} answers: {expected}")


def _max_tokens(session: Session) -> None:
    answers = []
    for temperature in (0, 1.0):
        for length, prompt in zip(_LIMITS, session.prompts, strict=True):
            answers.append(session.ask(prompt, max_tokens=length, temperature=temperature, stream=temperature > 0))
    bad = [answer for answer in answers if _length(answer) > answer.request["max_tokens"]]
    _verdict(session, "fields: max_tokens", bad, len(answers), "no more than max_tokens")


def _length(answer: Answer) -> int:
    return max(len(answer.ids), answer.num_completion_tokens or 0)


def _stop_strings(session: Session) -> None:
    test, answers, bad = "fields: stop strings", [], []
    for base, prompt in zip(session.greedy_answers, session.prompts, strict=True):
        for part in (0.15, 0.3, 0.5, 0.8):
            start = int(len(base.text) * part)
            stop = base.text[start : start + session.random.choice((2, 3, 5, 8))]
            if not stop.strip() or "\ufffd" in stop:
                continue
            for stream in (False, True):
                length = session.options.greedy_tokens
                answer = session.ask(prompt, max_tokens=length, temperature=0, stop=[stop], stream=stream)
                answers.append(answer)
                if stop in answer.text:
                    bad.append(answer)
    _verdict(session, test, bad, len(answers), "the text ends before the stop string")


def _seeds(session: Session) -> None:
    test = "fields: seed repeats"
    if "seed" not in session.abilities.accepted:
        session.record(test, Verdict.NOT_TESTED, "refused by the server: seed")
        return

    def drawn(seed: int, **fields: object) -> list[Answer]:
        wanted = {"max_tokens": 48, "temperature": 1.0, "seed": seed, **fields}
        return [session.ask(prompt, **wanted) for prompt in session.prompts]

    base = drawn(_SEED)
    size = session.abilities.list_size or None
    seeded = [session.body(p, max_tokens=48, temperature=1.0, seed=_SEED) for p in session.prompts]
    beside = [session.body(p, max_tokens=48, temperature=1.0) for p in session.prompts]
    crowd = [choices[0] for choices in session.ask_all([*seeded, *beside], CROWD_WIDTH)][: len(seeded)]
    groups = {
        "again": drawn(_SEED),
        "streamed": drawn(_SEED, stream=True),
        "with logprobs": drawn(_SEED, logprobs=size),
    }
    groups["in a crowd"] = crowd
    equal = {name: _num_equal(base, answers) for name, answers in groups.items()}
    same_text = _num_equal(base, drawn(_OTHER_SEED))
    told = f"of {len(base)} answers the same: " + ", ".join(f"{name} {count}" for name, count in equal.items())
    told += f"; with another seed {same_text}"
    if same_text == len(base):
        session.keep(test, "another answer for another seed", base[0])
        session.record(test, Verdict.FAIL, told)
    else:
        repeats = all(count == len(base) for count in equal.values())
        session.record(test, Verdict.PASS if repeats else Verdict.NOTE, told)


def _num_equal(base: list[Answer], others: list[Answer]) -> int:
    return sum(one.text == other.text for one, other in zip(base, others, strict=True))


def _bias(session: Session, common: list[int]) -> None:
    wanted = {str(common[0]): 100}
    banned = {str(token): -100 for token in common}
    endless = True if "ignore_eos" in session.abilities.accepted else None
    bodies = [
        session.body(p, max_tokens=24, temperature=t, logit_bias=bias, ignore_eos=endless, **session.ids_asked)
        for p in session.prompts
        for t in (0, 1.0)
        for bias in (wanted, banned)
    ]
    answers = [choices[0] for choices in session.ask_all(bodies, session.options.width)]

    def is_wrong(answer: Answer) -> bool:
        if answer.request["logit_bias"] == wanted:
            return any(token != common[0] for token in answer.ids)
        return any(token in common for token in answer.ids)

    bad = [answer for answer in answers if is_wrong(answer) or not answer.ids]
    expected = "nothing but the token biased by 100, and no token biased by -100"
    _verdict(session, "fields: logit_bias of 100 and -100", bad, len(answers), expected)


def _min_tokens(session: Session, common: list[int]) -> None:
    test, usual = "fields: min_tokens with stop_token_ids", next(a for a in session.greedy_answers if a.ids)
    asked = {**usual.request, "stop_token_ids": [usual.ids[len(usual.ids) // 2]], "stream": None}
    stopped = session.ask(asked.pop("prompt"), **asked)
    if len(stopped.ids) == len(usual.ids):
        session.record(test, Verdict.NOT_TESTED, "stop_token_ids has no effect: answers go on behind the token")
        return
    bodies = [
        session.body(
            p, max_tokens=40, min_tokens=_MIN_TOKENS, temperature=t, stop_token_ids=common[:1], **session.ids_asked
        )
        for p in session.prompts
        for t in (0, 1.0)
    ]
    answers = [choices[0] for choices in session.ask_all(bodies, session.options.width)]
    bad = [a for a in answers if len(a.ids) < _MIN_TOKENS or common[0] in a.ids[:_MIN_TOKENS]]
    _verdict(session, test, bad, len(answers), f"at least {_MIN_TOKENS} tokens, no stop token among them")


def _penalties(session: Session) -> None:
    """Greedy is the argmax after the penalties; fails only if counting the prompt's tokens too does not explain it."""
    test, abilities = "fields: greedy with penalties", session.abilities
    if "presence_penalty" not in abilities.accepted or abilities.lists != "raw" or not abilities.names_ids:
        session.record(test, Verdict.NOT_TESTED, "needs presence_penalty, and raw lists that name token ids")
        return
    bodies = [
        session.body(p, max_tokens=48, temperature=0, logprobs=abilities.list_size, **penalties)
        for penalties in _PENALTIES
        for p in session.prompts
    ]
    answers = [choices[0] for choices in session.ask_all(bodies, session.options.width)]
    bad = [a for a in answers if all(_num_off_argmax(session, a, with_prompt) for with_prompt in (False, True))]
    _verdict(session, test, bad, len(answers), "each token the most likely one after the penalties")


def _num_off_argmax(session: Session, answer: Answer, with_prompt: bool) -> int:
    asked, counts = answer.request, Counter[str]()
    if with_prompt and not isinstance(asked["prompt"], str):
        counts = Counter(f"token_id:{token}" for token in asked["prompt"])
    wrong, allowed = 0, tolerance(session)
    for token in answer.tokens:
        after = dict(token.law)
        for key in after.keys() & +counts:
            after[key] -= asked["presence_penalty"] + asked["frequency_penalty"] * counts[key]
        if token.key in after and max(after.values()) - after[token.key] > allowed:
            wrong += 1
        counts[token.key] += 1
    return wrong


def _choices(session: Session) -> None:
    """Choices of one request that share their random numbers are all equal."""
    test = "fields: choices differ"
    if "n" not in session.abilities.accepted:
        session.record(test, Verdict.NOT_TESTED, "refused by the server: n")
        return
    bodies = [session.body(p, max_tokens=48, temperature=1.0, n=3, seed=None) for p in session.prompts]
    answers = session.ask_all(bodies, 4)
    equal = [choices[0] for choices in answers if len({choice.text for choice in choices}) == 1]
    # A likely text may come three times; that of every prompt does not.
    bad = equal if len(equal) == len(answers) else []
    _verdict(session, test, bad, len(answers), "three choices of one request are not all equal")


def check_usage(session: Session) -> None:
    test = "usage: counted = sent"
    sampled = [session.ask(p, max_tokens=23, temperature=1.0) for p in session.prompts]
    answers = [a for a in (*session.greedy_answers, *sampled) if a.ids and a.num_completion_tokens is not None]
    if not answers:
        session.record(test, Verdict.NOT_TESTED, "needs token ids and usage")
        return
    bad = [answer for answer in answers if not _counts_what_it_sends(answer)]
    _verdict(session, test, bad, len(answers), "usage counts the tokens that are sent")


def _counts_what_it_sends(answer: Answer) -> bool:
    prompt, more = answer.request["prompt"], (answer.num_completion_tokens or 0) - len(answer.ids)
    # Some servers send no id of the token that ends the text.
    right_answer = more == 0 or (more == 1 and answer.finish == "stop")
    return right_answer and (isinstance(prompt, str) or answer.num_prompt_tokens == len(prompt))
