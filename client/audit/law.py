"""Sampled answers: each token is drawn from the law that the request states."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .answers import Answer, Law
from .evidence import Draw, Evidence, limit, weigh
from .session import Prompt, Session
from .verdicts import Verdict

# tokens of one sampled answer
_ANSWER_TOKENS = 48
# all conditions together; the others' weights sum to at most the rest of 1
_POOLED_WEIGHT = 0.4
# nats; two tokens this close at the limit of top_k may be cut either way
_TIE = 1e-3
# probability of all unlisted tokens, at least: a list's printed figures may add up to 1 when they should not
_LEAST_REST = 1e-5
# probability; a cumulative mass this close to top_p may be cut either way
_MASS_TIE = 3e-3


@dataclass(frozen=True)
class Condition:
    """One way of asking, with the law that follows from the model's."""

    name: str
    weight: float  # of the false-alarm budget
    share: float  # of the tokens
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1
    forced: bool = False  # drawn without logprobs, laws by teacher forcing
    needs: tuple[str, ...] = ()  # fields that the server must accept

    @property
    def fields(self) -> dict[str, Any]:
        wanted: dict[str, Any] = {"temperature": self.temperature, "n": self.n if self.n > 1 else None}
        wanted |= {"top_k": self.top_k} if self.top_k else {}
        wanted |= {"top_p": self.top_p} if self.top_p < 1 else {}
        if self.presence or self.frequency:
            wanted |= {"presence_penalty": self.presence, "frequency_penalty": self.frequency}
        if self.bias:
            wanted["logit_bias"] = {str(token): value for token, value in self.bias.items()}
        return wanted

    @property
    def is_plain(self) -> bool:
        return self.temperature == 1 and not (self.bias or self.presence or self.frequency)


def check_law(session: Session) -> None:
    """All conditions but those of top_k, and the evidence of all plain ones together."""
    if session.abilities.list_size < 2:
        session.record("law", Verdict.NOT_TESTED, "the server reports no lists of logprobs")
        return
    common = Counter(token for answer in session.greedy_answers for token in answer.ids)
    bias = {token: 2.0 for token, _ in common.most_common(6)}
    conditions = [
        Condition("T = 1, reported law", 0.15, 0.4),
        Condition("T = 1, no logprobs asked, teacher-forced law", 0.15, 0.25, forced=True),
        Condition("T = 0.7", 0.05, 0.1, temperature=0.7),
        Condition("top_p = 0.7", 0.05, 0.08, top_p=0.7, needs=("top_p",)),
        Condition("penalties", 0.05, 0.06, presence=1.0, frequency=0.5, needs=("presence_penalty",)),
        Condition("n = 4", 0.05, 0.06, n=4, needs=("n",)),
    ]
    if bias:
        conditions.append(Condition("logit_bias", 0.05, 0.05, bias=bias, needs=("logit_bias",)))
    pooled = [draw for condition in conditions for draw in run_condition(session, condition)]
    if pooled:
        _record(session, "law: all conditions together", weigh(pooled, _POOLED_WEIGHT), _POOLED_WEIGHT)


def check_top_k_law(session: Session) -> None:
    """A dangerous field (one top_k has killed a released server), so this runs last."""
    if session.abilities.list_size > 5 and "top_k" in session.abilities.neutral:
        run_condition(session, Condition("top_k = 5", 0.05, 0.06, top_k=5))
    else:
        session.record("law: top_k = 5", Verdict.NOT_TESTED, "needs top_k and lists of more than 5")


def run_condition(session: Session, condition: Condition) -> list[Draw]:
    """Asks, records the verdict, and returns the draws that may be pooled."""
    test = f"law: {condition.name}"
    if why := _obstacle(session, condition):
        session.record(test, Verdict.NOT_TESTED, why)
        return []
    answers = _sampled(session, condition)
    hypotheses = (False, True) if condition.presence or condition.frequency else (False,)
    outcomes = [_draws(session, condition, answers, prompt_counts) for prompt_counts in hypotheses]
    if any(missing for _, _, missing in outcomes):
        # What is left without them is a selection, and a right law fails on a selection.
        missing = outcomes[0][2]
        session.record(test, Verdict.NOT_TESTED, f"{missing} tokens have no list: see the tests of logprobs")
        return []
    weighed = [(weigh(draws, condition.weight), draws, outside) for draws, outside, _ in outcomes if draws]
    if not weighed:
        session.record(test, Verdict.NOT_TESTED, "no token could be judged")
        return []
    evidence, draws, outside = min(weighed, key=lambda entry: (entry[0].is_broken, entry[0].ln_e))
    if evidence.is_broken:
        session.keep(test, f"tokens drawn from {condition.name}", *(outside or answers)[:3])
    _record(session, test, evidence, condition.weight)
    return draws


def _obstacle(session: Session, condition: Condition) -> str:
    abilities = session.abilities
    if refused := [name for name in condition.needs if name not in abilities.accepted]:
        return f"refused by the server: {', '.join(refused)}"
    if condition.forced and not (session.can_force and abilities.gives_ids):
        return "needs token ids of answers, and prompts of token ids"
    if not condition.is_plain and abilities.lists != "raw":
        return f"the lists are {abilities.lists}, not the model's law"
    if (condition.bias or condition.presence or condition.frequency) and not abilities.names_ids:
        return "the lists do not name token ids"
    return ""


def _sampled(session: Session, condition: Condition) -> list[Answer]:
    budget = session.options.tokens * condition.share
    if condition.forced and not session.abilities.prompt_logprobs:
        budget /= 4  # a request for each law
    rounds = max(1, round(budget / (_ANSWER_TOKENS * condition.n * len(session.prompts))))
    extra: dict[str, Any] = dict(condition.fields)
    # llama.cpp takes the end's token out of the law before it is cut, and reports the law with it.
    is_cut = bool(condition.top_k or condition.top_p < 1)
    if "ignore_eos" in session.abilities.accepted and not is_cut:
        extra["ignore_eos"] = True
    if not condition.forced:
        extra["logprobs"] = session.abilities.list_size
    bodies = [session.body(p, max_tokens=_ANSWER_TOKENS, **extra) for _ in range(rounds) for p in session.prompts]
    answers = session.ask_all(bodies, session.options.width)
    return [choice for choices in answers for choice in choices]


def _draws(
    session: Session, condition: Condition, answers: Sequence[Answer], prompt_counts: bool
) -> tuple[list[Draw], list[Answer], int]:
    """The draws, the answers with a token outside of the law's support, and the tokens without a list."""
    draws: list[Draw] = []
    outside, missing = [], 0
    for number, answer in enumerate(answers):
        laws, keys = _laws(session, condition, answer)
        prompt: Prompt = answer.request["prompt"]
        counts = Counter(f"token_id:{token}" for token in prompt) if prompt_counts else Counter()
        seen: set[str] = set()
        for place, key in enumerate(keys):
            law = laws.get(place)
            if law is not None and len(law) < 2:
                missing += 1
            elif law is not None:
                stated = _stated(condition, law, counts)
                if stated is not None:
                    draw = _draw(stated, key, number, place, seen)
                    draws.append(draw)
                    if draw.rank < 0 and draw.rest == 0:
                        outside.append(answer)
            counts[key] += 1
            seen.add(key)
    return draws, outside, missing


def _laws(session: Session, condition: Condition, answer: Answer) -> tuple[Mapping[int, Law], list[str]]:
    if not condition.forced:
        return {p: t.law for p, t in enumerate(answer.tokens)}, [token.key for token in answer.tokens]
    places = session.places(_ANSWER_TOKENS)
    forced = session.forced_laws(answer.request["prompt"], answer.ids, places)
    return forced, [f"token_id:{token}" for token in answer.ids]


def _stated(
    condition: Condition, law: Law, counts: Mapping[str, int]
) -> tuple[list[tuple[str, float]], float | None] | None:
    """The law of the condition from the model's: (listed tokens, rest). None: too close to a cut to say."""
    if condition.top_k:
        kept = list(law[: condition.top_k])
        return None if kept[-1][1] - law[condition.top_k][1] < _TIE else (kept, 0.0)
    if condition.top_p < 1:
        return _nucleus(law, condition.top_p)
    if condition.is_plain:
        return list(law), max(_LEAST_REST, 1 - math.fsum(math.exp(value) for _, value in law))
    changed = []
    for key, value in law:
        token = int(key.removeprefix("token_id:")) if key.startswith("token_id:") else -1
        penalty = condition.presence + condition.frequency * counts[key] if counts.get(key) else 0.0
        changed.append((key, (value + condition.bias.get(token, 0.0) - penalty) / condition.temperature))
    return sorted(changed, key=lambda entry: -entry[1]), None


def _nucleus(law: Law, top_p: float) -> tuple[list[tuple[str, float]], float] | None:
    mass = 0.0
    kept: list[tuple[str, float]] = []
    for place, (key, value) in enumerate(law):
        if abs(mass - top_p) < _MASS_TIE:
            return None
        if mass >= top_p:
            return None if law[place - 1][1] - value < _TIE else (kept, 0.0)
        kept.append((key, value))
        mass += math.exp(value)
    return None


def _draw(
    stated: tuple[list[tuple[str, float]], float | None], key: str, request: int, index: int, seen: set[str]
) -> Draw:
    law, rest = stated
    rank = next((i for i, (listed, _) in enumerate(law) if listed == key), -1)
    repeated = tuple(listed in seen for listed, _ in law)
    return Draw(tuple(value for _, value in law), rest, rank, request, index, repeated)


def _record(session: Session, test: str, evidence: Evidence, weight: float) -> None:
    (ratio, ratio_error), (share, share_error) = evidence.temperature, evidence.greedy_share
    told = (
        f"{evidence.num_tokens} tokens: ln e {evidence.ln_e:.1f} (alarm at {limit(weight):.1f}); "
        f"temperature {ratio:.3f} +- {ratio_error:.3f} times the stated one, "
        f"argmax taken for {100 * share:.1f} +- {100 * share_error:.1f} % of the draws"
    )
    if evidence.num_impossible:
        told += f"; {evidence.num_impossible} tokens that the law rules out"
    if evidence.found_at is not None:
        told += f"; found after {evidence.found_at} tokens, by {evidence.family}"
    verdict = Verdict.FAIL if evidence.is_broken else Verdict.PASS
    power = f"a temperature off by {250 / math.sqrt(evidence.num_tokens):.1f} %, in half of the runs"
    figures = {"n": evidence.num_tokens, "ln_e": round(evidence.ln_e, 2), "family": evidence.family}
    session.record(test, verdict, told, power, found_at=evidence.found_at, **figures)
