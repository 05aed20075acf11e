#!/usr/bin/env bash
# The wheels, each in an empty environment: the server's from nothing to the first completion, timed; then the client's
# asks that stack, and the audit's tests it.
#   make wheels && deploy/packaging/try_wheel.sh            # the models of this repository
#   deploy/packaging/try_wheel.sh MODEL_FOLDER DRAFT_MODEL_FOLDER
# TORCH=torch==2.13.0 is what is installed first. PYTHON=python3 makes the environment. Needs redis-server on the PATH.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
model=${1:-$root/models/demo-target}
draft_model=${2:-$root/models/demo-draft}
wheels=("$root"/dist/outrider-[0-9]*.whl)
client_wheels=("$root"/dist/outrider_client-*.whl)
audit_wheels=("$root"/dist/outrider_audit-*.whl)
work=$(mktemp -d)
outrider=$work/venv/bin/outrider

finish() {
  [ ! -x "$outrider" ] || (cd "$work" && "$outrider" down) || true
  rm -rf "$work"
}
trap finish EXIT

quiet() { "$@" >/dev/null; }

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
step "outrider --help" quiet "$outrider" --help
began=$EPOCHREALTIME
step "outrider up" "$outrider" up --detach --model "$model" --draft-model "$draft_model" --port 8600 --grpc-port 8601
step "the first completion" "$outrider" complete "import os" --max-tokens 32
awk -v began="$began" -v now="$EPOCHREALTIME" \
  'BEGIN { printf "==> from `outrider up` to the end of the first completion: %.1f s\n", now - began }'

step "an empty environment for the client" "${PYTHON:-python3}" -m venv client
step "the client's wheel and what it needs" client/bin/pip install --quiet --disable-pip-version-check -c "$root/deploy/constraints.txt" "${client_wheels[-1]}"
step "outrider --help" quiet client/bin/outrider --help
[ "$(client/bin/outrider version)" = "$("$outrider" version)" ]
step "its first completion" client/bin/outrider complete "import os" --max-tokens 32 --address 127.0.0.1:8601
step "an empty environment for the audit" "${PYTHON:-python3}" -m venv audit
step "the audit's wheel and what it needs" audit/bin/pip install --quiet --disable-pip-version-check -c "$root/deploy/constraints.txt" "${audit_wheels[-1]}"
step "its tests of greedy answers" quiet audit/bin/outrider-audit http://127.0.0.1:8600 --tests greedy
echo "==> all wheels work: $(client/bin/outrider version)"
