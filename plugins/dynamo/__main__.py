"""python -m outrider.plugins.dynamo: a worker, in the environment of ai-dynamo."""

from __future__ import annotations

import sys

from outrider.plugins.dynamo.options import parser


def main() -> None:
    try:
        from dynamo.common.backend.run import run

        from outrider.plugins.dynamo.worker import Engine, full_parser
    except ModuleNotFoundError as error:
        parser().parse_known_args()
        sys.exit(f"this needs NVIDIA Dynamo, and {error.name} is not installed: pip install ai-dynamo")
    full_parser().parse_args()  # before Dynamo's runtime starts: a wrong option is named at once
    run(Engine)


if __name__ == "__main__":
    main()
