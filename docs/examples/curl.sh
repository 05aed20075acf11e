#!/usr/bin/env bash
# REST with curl:  docs/examples/curl.sh [http://127.0.0.1:8000]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}

curl --fail-with-body -sS "$url/v1/completions" -H 'content-type: application/json' \
  -d '{"prompt": "import os", "max_tokens": 32, "temperature": 0}'
echo

# Streamed; an event's id, as Last-Event-ID of the same request, goes on after it at any gateway of the fleet.
curl --fail-with-body -sSN "$url/v1/chat/completions" -H 'content-type: application/json' \
  -d '{"messages": [{"role": "user", "content": "Write a function that reads a file."}],
       "max_tokens": 32, "seed": 1, "stream": true}'
