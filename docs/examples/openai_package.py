"""The `openai` package, unchanged:  pip install openai && python docs/examples/openai_package.py [http://127.0.0.1:8000/v1]"""

from __future__ import annotations

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="unused")
[model] = client.models.list().data

answer = client.completions.create(model=model.id, prompt="import os", max_tokens=32, temperature=0)
print(answer.choices[0].text)

chat = client.chat.completions.create(
    model=model.id,
    messages=[{"role": "user", "content": "Write a function that reads a file."}],
    max_completion_tokens=48,
    seed=1,
    stream=True,
    extra_body={"speculation": {"method": "draft_model", "num_speculative_tokens": 4}},  # Outrider's own; optional
)
for chunk in chat:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
