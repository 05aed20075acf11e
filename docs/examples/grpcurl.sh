#!/usr/bin/env bash
# gRPC with grpcurl, from the repository's root:  docs/examples/grpcurl.sh [127.0.0.1:8001]
# The protos are given because a gateway that listens on more than loopback offers no reflection.
set -euo pipefail
address=${1:-127.0.0.1:8001}
protos=$(dirname "$0")/../../protos

grpcurl -plaintext -import-path "$protos" -proto outrider/v1/gateway.proto -d '{
  "prompt": "import os",
  "samplingParams": {"temperature": 0, "maxTokens": 32},
  "speculation": {"method": "draft_model", "numSpeculativeTokens": 4}
}' "$address" outrider.v1.Gateway/Generate
