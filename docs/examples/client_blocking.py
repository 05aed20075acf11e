"""The blocking client, over gRPC:  pip install outrider-client; python docs/examples/client_blocking.py
[127.0.0.1:8001]"""

from __future__ import annotations

import sys

from outrider import OutriderClient, SamplingParams
from outrider.client import Speculation, StructuredOutputsParams

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"
with OutriderClient(address) as client:
    answer = client.generate("import os", SamplingParams(temperature=0, max_tokens=32, logprobs=0))
    print(answer.text)
    print(f"{answer.usage.completion_tokens} tokens, log-probability {answer.cumulative_logprob:.2f}")

    # Token by token, each with where it came from: the target alone, a draft that was accepted, ...
    drafted = SamplingParams(seed=1, max_tokens=32, speculation=Speculation(method="draft_model"))
    for update in client.stream([{"role": "user", "content": "Write a function that reads a file."}], drafted):
        for token in update.tokens:
            print(f"{token.origin:9} {token.text!r}")
        if update.completion is not None:
            print(f"{update.completion.speculation.mean_acceptance_length:.2f} tokens per round")

    left_or_right = StructuredOutputsParams(choice=["left", "right"])
    print(client.generate("Turn ", SamplingParams(seed=1, structured_outputs=left_or_right)).text)
