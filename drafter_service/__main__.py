"""The drafter service: `python -m outrider.drafter_service --draft-model models/demo-draft`."""

from __future__ import annotations

import sys

from outrider.shared.machine.memory import imports_kept


def main() -> int:
    with imports_kept():
        from outrider.drafter_service.start import serve
        from outrider.shared.service import run_service
    return run_service("drafter", lambda: serve(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
