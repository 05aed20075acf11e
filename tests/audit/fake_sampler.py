"""Speculative sampling over the laws' tables, right or with one planted defect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.audit.fake_laws import EOS, VOCABULARY, Array, Laws

_DRAFTS = 4
# Each is a defect that a speculative sampler of some engine had, or could have.
DEFECTS = {
    "argmax": "the argmax is committed at drafted places at any temperature",
    "greedy5": "the argmax is committed at 5 % of the places",
    "typical": "typical acceptance of one-hot drafts",
    "bonus_greedy": "the bonus token is greedy",
    "wrongq": "q is not the law that the draft was drawn from",
    "draftlaw": "the draft's law at rejected places",
    "noresid": "the target's law at rejected places, not the residual",
    "only_nolp": "the draft's law at rejected places, when no logprobs are asked",
    "temp3": "the temperature is off by 3 %",
    "temp_twice": "the temperature is applied twice",
    "topp_ignored": "top_p and top_k are ignored at drafted places",
    "noise_repeat": "each round draws with the same noise",
    "shared_noise": "requests and choices share their noise",
    "lenient": "greedy accepts drafts of 0.8 of the maximum",
    "crowd": "a wrong token in crowds, 1 of 150",
    "stale_kv": "a rejected draft stays in the context",
    "lp_draft": "accepted tokens have the draft's logprobs",
    "lp_zero": "accepted tokens have logprob 0 and no list",
    "bias_stale": "no logit_bias at drafted places",
    "pen_stale": "penalties of the round's start at drafted places",
    "min_tokens": "min_tokens is ignored at drafted places",
    "overshoot": "max_tokens is exceeded by what was accepted",
    "stop_cross": "a stop string across two rounds is not seen",
    "seed_crowd": "seeds do not repeat in a crowd",
    "tool_garble": "streamed arguments lose a character",
    "tool_differs": "arguments differ in 5 % of the calls",
}


@dataclass
class Sampled:
    ids: list[int] = field(default_factory=list)
    reported: list[Array | None] = field(default_factory=list)  # the law that the logprobs tell; None: 0.0, no list
    rounds: list[int] = field(default_factory=list)


@dataclass
class Sampler:
    laws: Laws
    settings: dict[str, Any]
    rng: np.random.Generator
    defect: str
    in_crowd: bool
    noise_seed: int

    def sample(self, prompt: list[int]) -> Sampled:
        done, out, context = False, Sampled(), list(prompt)
        self.counts: dict[int, int] = {}
        self.wrong: tuple[int, int] | None = None  # (place, token) that a stale cache has there
        while not done:
            if self.defect == "noise_repeat":
                self.rng = np.random.default_rng((self.noise_seed, 5))
            committed = self._round(context, out)
            out.rounds.append(0)
            for token, law in committed:
                out.ids.append(token)
                out.reported.append(law)
                context.append(token)
                out.rounds[-1] += 1
                self.counts[token] = self.counts.get(token, 0) + 1
                if self._ends(token):
                    done = True
                    break
                if len(out.ids) >= self.settings["max_tokens"] and self.defect != "overshoot":
                    break
            done = done or len(out.ids) >= self.settings["max_tokens"] or self._stops(out)
        return out

    def _ends(self, token: int) -> bool:
        return (token == EOS and not self.settings["ignore_eos"]) or token in self.settings["stop_ids"]

    def _stops(self, out: Sampled) -> bool:
        seen = out.ids[-out.rounds[-1] :] if self.defect == "stop_cross" else out.ids
        return any(stop in self.laws.text(seen) for stop in self.settings["stop"])

    # ---- one round
    def _round(self, context: list[int], out: Sampled) -> list[tuple[int, Array | None]]:
        drafts = self._drafts(context, len(out.ids)) if out.ids else []
        committed: list[tuple[int, Array | None]] = []
        counts = dict(self.counts)
        for token, q, draft_law in drafts:
            law, p = self._target([*context, *(t for t, _ in committed)], counts, len(out.ids) + len(committed), True)
            chosen, accepted = self._verify(token, p, q, law)
            reported: Array | None = law
            if accepted and self.defect in ("lp_draft", "lp_zero"):
                reported = draft_law if self.defect == "lp_draft" else None
            committed.append((chosen, reported))
            counts[chosen] = counts.get(chosen, 0) + 1
            if not accepted:
                if self.defect == "stale_kv" and self.rng.random() < 0.3:
                    self.wrong = (len(context) + len(committed) - 1, token)
                return committed
        law, p = self._target([*context, *(t for t, _ in committed)], counts, len(out.ids) + len(committed), False)
        greedy = (self.defect == "bonus_greedy" and drafts) or self._greedy_share()
        committed.append((int(p.argmax()) if greedy else self._draw(p), law))
        return committed

    def _drafts(self, context: list[int], length: int) -> list[tuple[int, Array, Array]]:
        drafts: list[tuple[int, Array, Array]] = []
        for _ in range(_DRAFTS):
            row = self.laws.state([*context[-3:], *(token for token, _, _ in drafts)])
            law, q = self.laws.draft[row], self._with_settings(self.laws.draft[row], self.counts, length, False)
            if self.defect == "typical":
                q = np.eye(VOCABULARY)[int(law.argmax())]
            token = self._draw(q)
            if self.defect == "wrongq" and self.settings["temperature"] > 0:
                q = q ** (1 / 0.7) / (q ** (1 / 0.7)).sum()
            drafts.append((token, q, law))
        return drafts

    def _target(self, context: list[int], counts: dict[int, int], length: int, drafted: bool) -> tuple[Array, Array]:
        if self.wrong is not None and len(context) - self.wrong[0] < 3:
            context = [*context[: self.wrong[0]], self.wrong[1], *context[self.wrong[0] + 1 :]]
        law = self.laws.target[self.laws.state(context)]
        counts = self.counts if drafted and self.defect == "pen_stale" else counts
        return law, self._with_settings(law, counts, length, drafted)

    def _verify(self, token: int, p: Array, q: Array, law: Array) -> tuple[int, bool]:
        best = int(p.argmax())
        if self.settings["temperature"] == 0:
            close = self.defect == "lenient" and not self.settings["bias"] and law[token] >= law[best] + np.log(0.8)
            if self.defect == "crowd" and self.in_crowd and self.rng.random() < 1 / 150:
                return int(np.argsort(-law)[1]), False
            return (token, True) if token == best or close else (best, False)
        if self.defect == "argmax" or self._greedy_share():
            return best, token == best
        if self.defect == "typical":
            entropy = -(p[p > 0] * np.log(p[p > 0])).sum()
            return (token, True) if p[token] >= min(0.09, 0.3 * np.exp(-entropy)) else (self._draw(p), False)
        if self.rng.random() < min(1.0, p[token] / max(q[token], 1e-300)):
            return token, True
        if self.defect == "draftlaw" or (self.defect == "only_nolp" and not self.settings["logprobs"]):
            return self._draw(q), False
        residual = np.maximum(p - q, 0)
        use_target = self.defect == "noresid" or residual.sum() <= 0
        return self._draw(p if use_target else residual / residual.sum()), False

    def _greedy_share(self) -> bool:
        return self.defect == "greedy5" and self.settings["temperature"] > 0 and self.rng.random() < 0.05

    def _draw(self, p: Array) -> int:
        cumulative = np.cumsum(p)
        place = np.searchsorted(cumulative, self.rng.random() * cumulative[-1], side="right")
        return int(min(place, VOCABULARY - 1))

    # ---- the law that the request's fields make of the model's
    def _with_settings(self, law: Array, counts: dict[int, int], length: int, drafted: bool) -> Array:
        wanted, logits = self.settings, law.copy()
        if not (drafted and self.defect == "bias_stale"):
            for token, value in wanted["bias"].items():
                logits[token] += value
        if wanted["presence"] or wanted["frequency"]:
            for token, count in counts.items():
                logits[token] -= wanted["presence"] + wanted["frequency"] * count
        if length < wanted["min_tokens"] and not (drafted and self.defect == "min_tokens"):
            logits[[EOS, *wanted["stop_ids"]]] = -np.inf
        temperature = wanted["temperature"]
        if temperature == 0:
            return np.eye(VOCABULARY)[int(logits.argmax())]
        temperature *= 0.97 if self.defect == "temp3" else temperature if self.defect == "temp_twice" else 1.0
        p = np.exp((logits - logits.max()) / temperature)
        p /= p.sum()
        return p if self.defect == "topp_ignored" and drafted else _cut(p, wanted["top_k"], wanted["top_p"])


def _cut(p: Array, top_k: int, top_p: float) -> Array:
    if 0 < top_k < VOCABULARY:
        p = np.where(p >= np.partition(p, -top_k)[-top_k], p, 0.0)
        p = p / p.sum()
    if top_p < 1:
        order = np.argsort(-p)
        mass = np.cumsum(p[order])
        kept = order[mass - p[order] < top_p]
        cut = np.zeros_like(p)
        cut[kept] = p[kept]
        p = cut / cut.sum()
    return p
