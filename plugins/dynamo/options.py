"""The command line of the worker: ours here; Dynamo's own are added where it is installed (worker.py)."""

from __future__ import annotations

import argparse

_DESCRIPTION = """\
Serves an Outrider gateway as a worker of NVIDIA Dynamo.

A request that Dynamo migrates from a dead worker goes on from Outrider's log, byte for byte.

Examples:

  python -m outrider.plugins.dynamo --gateway 127.0.0.1:8000 --model ~/checkpoints/llama

  python -m outrider.plugins.dynamo --gateway gateway-1:8000 --gateway gateway-2:8000 --model ORG/NAME \\
      --dyn-tool-call-parser hermes --discovery-backend etcd
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m outrider.plugins.dynamo",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    ours = made.add_argument_group("Outrider")
    ours.add_argument(
        "--gateway",
        action="append",
        required=True,
        metavar="HOST:PORT",
        help="REST address of a gateway, or its URL; may be repeated: others take over from one that is lost",
    )
    ours.add_argument(
        "--model",
        required=True,
        help="folder or Hub id of the checkpoint that the gateway serves; Dynamo reads its tokenizer and chat template",
    )
    ours.add_argument("--served-model-name", default=None, help="name in requests to Dynamo; the gateway's if left out")
    ours.add_argument("--component", default="outrider", help="Dynamo's name for workers of this kind")
    ours.add_argument(
        "--patience-s",
        type=float,
        default=60.0,
        help="seconds that a request waits while no gateway serves it, before Dynamo tries another worker",
    )
    return made
