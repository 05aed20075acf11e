"""The full table: which planted defects a whole audit finds, with how many tokens, and the alarms of correct servers.

python -m tests.audit.power --budget 8000 --correct 200
"""

from __future__ import annotations

import argparse

from outrider.client.audit.run import run_audit
from outrider.client.audit.session import Options
from outrider.client.audit.verdicts import Report, Verdict
from outrider.client.audit.wire import Server
from tests.audit.fake_sampler import DEFECTS
from tests.audit.fake_server import FakeServer


def audited(defect: str, budget: int, seed: int = 1, only: frozenset[str] = frozenset()) -> Report:
    server = Server("http://fake", transport=FakeServer(defect, seed).transport)
    return run_audit(server, Options(tokens=budget, seed=seed, only=only))


def broken(report: Report) -> list[str]:
    return [finding.test for finding in report.findings if finding.verdict is Verdict.FAIL]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=int, default=8000)
    parser.add_argument("--correct", type=int, default=20)
    parser.add_argument("--defects", default=",".join(DEFECTS))
    chosen = parser.parse_args()
    found = 0
    defects = [name for name in chosen.defects.split(",") if name]
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


if __name__ == "__main__":
    main()
