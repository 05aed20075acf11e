"""Many prompts, a few at a time, with progress:  python docs/examples/client_batch.py [127.0.0.1:8001]"""

from __future__ import annotations

import sys

from outrider import OutriderClient, SamplingParams
from outrider.client import BatchFailed

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"
prompts = [f"def power_{number}(x):\n    return" for number in range(12)]


def progress(num_done: int, num_prompts: int) -> None:
    print(f"\r{num_done} of {num_prompts}", end="", file=sys.stderr)


with OutriderClient(address) as client:
    try:
        completions = client.batch(
            prompts, SamplingParams(temperature=0, max_tokens=16), max_concurrency=4, progress=progress
        )
    except BatchFailed as failed:  # the others' completions are in it
        sys.exit(str(failed))
for prompt, completion in zip(prompts, completions, strict=True):
    print(prompt + completion.text.split("\n")[0])
