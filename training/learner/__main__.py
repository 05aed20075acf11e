"""`python -m outrider.training.learner`: started by a verifier with --learn; reads its standard input (inbox.py)."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# nice; gives way to what serves, and still gets its share of a busy core
_NICE = 5


def main() -> None:
    os.nice(_NICE)
    reports = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print where they like

    def report(message: dict[str, Any]) -> None:
        os.write(reports, json.dumps(message).encode() + b"\n")

    import torch

    from outrider.drafting.checkpoints.errors import CheckpointRefused
    from outrider.training.errors import TrainingError
    from outrider.training.learner.inbox import Inbox
    from outrider.training.learner.learner import HeadLearner

    torch.set_num_threads(1)
    inbox = Inbox(sys.stdin.buffer)
    inbox.start()
    try:
        learner = HeadLearner(inbox, report)
    except (CheckpointRefused, TrainingError) as error:
        report({"cannot": str(error)})
        return
    report({"ready": True})
    learner.run()


if __name__ == "__main__":
    main()
