#!/usr/bin/env bash
# From nothing to the first completion, timed: an empty environment, the server's wheel, `outrider up`, one request.
#   make wheels && deploy/packaging/try_wheel.sh            # the models of this repository
#   deploy/packaging/try_wheel.sh MODEL_FOLDER DRAFT_MODEL_FOLDER
# TORCH=torch==2.13.0 is what is installed first. PYTHON=python3 makes the environment. Needs redis-server on the PATH.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
model=${1:-$root/models/demo-target}
draft_model=${2:-$root/models/demo-draft}
wheels=("$root"/dist/outrider-[0-9]*.whl)
work=$(mktemp -d)
outrider=$work/venv/bin/outrider

finish() {
  [ ! -x "$outrider" ] || (cd "$work" && "$outrider" down) || true
  rm -rf "$work"
}
trap finish EXIT

step() {
  local began=$EPOCHREALTIME
  echo "==> $1"
  shift
  "$@"
  awk -v began="$began" -v now="$EPOCHREALTIME" 'BEGIN { printf "    %.1f s\n", now - began }'
}

cd "$work" # nothing of the repository is imported from here
step "an empty environment" "${PYTHON:-python3}" -m venv venv
step "torch" venv/bin/pip install --quiet --disable-pip-version-check -c "$root/deploy/constraints.txt" "${TORCH:-torch==2.13.0}"
step "the wheel and what it needs" venv/bin/pip install --quiet --disable-pip-version-check -c "$root/deploy/constraints.txt" "${wheels[-1]}[server]"
began=$EPOCHREALTIME
step "outrider up" "$outrider" up --detach --model "$model" --draft-model "$draft_model" --port 0 --grpc-port 8601
step "the first completion" "$outrider" complete "import os" --max-tokens 32
awk -v began="$began" -v now="$EPOCHREALTIME" \
  'BEGIN { printf "==> from `outrider up` to the end of the first completion: %.1f s\n", now - began }'
