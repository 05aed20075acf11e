"""The verifier service: `python -m outrider.verifier_service --model models/demo-target`."""

from __future__ import annotations

import sys

from outrider.shared.machine.memory import imports_kept


def main() -> int:
    with imports_kept():
        from outrider.shared.service import run_service
        from outrider.verifier_service.start import serve
    return run_service("verifier", lambda: serve(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
