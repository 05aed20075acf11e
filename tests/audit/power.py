"""The full table: which planted defects a whole audit finds, with how many tokens, and the alarms of correct servers.

python -m tests.audit.power --budget 8000 --correct 200
python -m tests.audit.power --budget 8000 --correct 0 --defects '' --curves 20
"""

from __future__ import annotations

import argparse

from outrider.client.audit.run import run_audit
from outrider.client.audit.session import Options
from outrider.client.audit.verdicts import Report, Verdict
from outrider.client.audit.wire import Server
from tests.audit.fake_sampler import DEFECTS
from tests.audit.fake_server import FakeServer

# Defects of the law, and the tokens for which a curve gives the share of runs that have found them.
LAW_DEFECTS = ("argmax", "typical", "wrongq", "bonus_greedy", "greedy5", "noise_repeat", "temp3")
_AT_TOKENS = (30, 100, 300, 1000, 3000, 8000)


def audited(defect: str, budget: int, seed: int = 1, only: frozenset[str] = frozenset()) -> Report:
    server = Server("http://fake", transport=FakeServer(defect, seed).transport)
    return run_audit(server, Options(tokens=budget, seed=seed, only=only))


def broken(report: Report) -> list[str]:
    return [finding.test for finding in report.findings if finding.verdict is Verdict.FAIL]


def found_at(defect: str, budget: int, seed: int) -> float:
    """Tokens of the law after which a run has found the defect, by all conditions together; infinite: it has not."""
    findings = audited(defect, budget, seed, frozenset({"law"})).findings
    places = [finding.figures.get("found_at") for finding in findings if finding.verdict is Verdict.FAIL]
    return min((place for place in places if place is not None), default=float("inf"))


def print_curves(budget: int, num_runs: int) -> None:
    print("| defect | " + " | ".join(f"{tokens:,}" for tokens in _AT_TOKENS) + " | tokens, median |")
    for defect in LAW_DEFECTS:
        places = sorted(found_at(defect, budget, seed) for seed in range(1, num_runs + 1))
        shares = [sum(place <= tokens for place in places) for tokens in _AT_TOKENS]
        median = places[num_runs // 2]
        print(f"| {defect} | " + " | ".join(map(str, shares)) + f" | {median:,.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=int, default=8000)
    parser.add_argument("--correct", type=int, default=20)
    parser.add_argument("--defects", default=",".join(DEFECTS))
    parser.add_argument("--curves", type=int, default=0, help="runs for each of the law's defects")
    chosen = parser.parse_args()
    found = 0
    defects = [name for name in chosen.defects.split(",") if name]
    if unknown := set(defects) - set(DEFECTS):
        parser.error(f"--defects: {', '.join(sorted(unknown))} is not one of {', '.join(DEFECTS)}")
    for defect in defects:
        report = audited(defect, chosen.budget)
        tests = broken(report)
        found += bool(tests)
        print(f"{defect:14s} {report.num_tokens:6d} tokens  {'; '.join(tests) or 'not found'}", flush=True)
    print(f"found {found} of {len(defects)}")
    alarms = []
    for seed in range(chosen.correct):
        if tests := broken(audited("", chosen.budget, seed)):
            alarms.append(seed)
            print(f"correct, seed {seed}: {'; '.join(tests)}")
        print(f"alarms in {len(alarms)} of {seed + 1} correct runs", end="\r", flush=True)
    print()
    if chosen.curves:
        print_curves(chosen.budget, chosen.curves)


if __name__ == "__main__":
    main()
