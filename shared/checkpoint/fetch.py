"""Downloads models of the Hugging Face Hub before a service starts, which then needs no network.

    python -m outrider.shared.checkpoint.fetch ORG/NAME ORG/DRAFT,models/HEAD
    python -m outrider.shared.checkpoint.fetch --no-weights ORG/NAME     what a gateway reads

A folder that is here, and an empty name, are passed over; nothing is downloaded twice. The cache is huggingface_hub's
(HF_HOME, HF_TOKEN, HF_ENDPOINT).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from outrider.shared.checkpoint.hub import local_checkpoint
from outrider.shared.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m outrider.shared.checkpoint.fetch", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument(
        "models", nargs="*", help="names of models, or several with commas as the services' settings have them"
    )
    made.add_argument("--no-weights", action="store_true", help="configuration and tokenizer only")
    return made


def main(argv: Sequence[str]) -> int:
    given = parser().parse_args(argv)
    try:
        for name in filter(None, ",".join(given.models).split(",")):
            print(f"{name}: {local_checkpoint(name, 'fetch', weights=not given.no_weights)}", flush=True)
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
