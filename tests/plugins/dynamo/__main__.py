"""python -m tests.plugins.dynamo --kills 100: the storm of storm.py, with its figures."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.plugins.dynamo.dynamo_fleet import DynamoFleet
from tests.plugins.dynamo.storm import Storm


async def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.plugins.dynamo", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="of workers, gateways and verifiers together")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outrider-dynamo-") as folder:
        async with DynamoFleet(Path(folder), num_verifiers=2) as fleet:
            await fleet.wait_ready()
            report = await Storm(fleet, arguments.kills).run()
    print(f"{report.kills.total()} kills {dict(report.kills)} in {report.seconds:.0f} s")
    print(f"{report.num_texts} texts, {report.num_struck} of them in mid-stream at a kill {dict(report.struck)}")
    print(
        f"{report.num_migrations} migrations by Dynamo, requests with a grammar asked again {report.asked_again} times"
    )
    print(f"{len(report.different)} different, {len(report.failed)} failed")
    for line in [*report.different, *report.failed][:20]:
        print(line[:600])
    return 1 if report.different or report.failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
