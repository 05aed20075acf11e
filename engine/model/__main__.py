"""`python -m outrider.engine.model NAME`: prints the checkpoint folder that the services read for a model's name.

It is made if need be: for a GGUF file, a tokenizer in an older form than tokenizer.json, a head in Mistral's layout.
Exit code 2: the model is refused.
"""

from __future__ import annotations

import sys

from outrider.engine.model.local_model import local_model
from outrider.shared.errors import OutriderError


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m outrider.engine.model NAME", file=sys.stderr)
        return 2
    try:
        print(local_model(sys.argv[1], "NAME"))
    except OutriderError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
