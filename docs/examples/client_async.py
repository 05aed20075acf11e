"""The asyncio client, two streams at once:  python docs/examples/client_async.py [127.0.0.1:8001[,another gateway,...]]

A stream continues at another gateway, or at the same one once it is back, when its connection is lost.
"""

from __future__ import annotations

import asyncio
import sys

from outrider import AsyncOutriderClient, SamplingParams


async def show(client: AsyncOutriderClient, prompt: str) -> None:
    async for update in client.stream(prompt, SamplingParams(temperature=0, max_tokens=32)):
        if update.text:
            print(f"{prompt}: {update.text!r}")


async def main(address: str) -> None:
    async with AsyncOutriderClient(address, timeout_s=120, stall_timeout_s=30) as client, asyncio.TaskGroup() as tasks:
        for prompt in ("import os", "def main():"):
            tasks.create_task(show(client, prompt))


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"))
