# Everything starts here: `make demo` shows the product, `make test` proves it. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
ONCE ?=
# Passed on to `outrider up`: make up PORT=9000 MODEL=~/checkpoints/llama DRAFT_MODEL=
MODEL ?= models/demo-target
DRAFT_MODEL ?= models/demo-draft
PORT ?= 8000
GRPC_PORT ?= 8001
REDIS_URL ?=
TESTS ?=
REQUESTS ?= 1000
INPUTS ?= 100000
MINUTES ?= 30
GPU_REPORT ?=
.DEFAULT_GOAL := help

PROTO_FILES := $(wildcard protos/outrider/v1/*.proto)
VENV_STAMP := $(VENV)/.venv-done
PROTO_STAMP := $(VENV)/.protos-done
SETUP_STAMP := $(VENV)/.setup-done

.PHONY: help setup protos demo up down compose-up compose-down test check format bench gpu-report chaos fuzz models wheels clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(VENV_STAMP):
	@echo "==> creating $(VENV) and installing packages (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q --upgrade pip
	@# torch first and pinned: a bare `torch` pulled in by another package may be another build.
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q 'grpcio-tools>=1.80,<2' 'mypy-protobuf>=3.7,<6'
	@touch $@

$(PROTO_STAMP): $(PROTO_FILES) $(VENV_STAMP)
	@echo "==> generating the gRPC code"
	@$(BIN)/python -m grpc_tools.protoc -I protos --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTO_FILES)
	@touch $@

# After the protos: an editable install only finds packages that exist when it is made.
$(SETUP_STAMP): pyproject.toml $(PROTO_STAMP)
	@echo "==> installing outrider"
	$(BIN)/pip install -q -e '.[gateway,engine,dev]'
	@command -v redis-server >/dev/null || $(MAKE) --no-print-directory redis
	@command -v chromium >/dev/null || $(MAKE) --no-print-directory browser
	@touch $@

setup: $(SETUP_STAMP) ## create .venv and install everything
protos: $(PROTO_STAMP) ## generate the gRPC code from protos/

.PHONY: redis
redis:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then echo "==> installing redis-server"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server >/dev/null; \
	else echo "redis-server is missing: install it (sudo apt-get install redis-server, brew install redis)"; exit 1; fi

# Only tests need it: where it cannot be installed, those in tests/playground are skipped and say so.
.PHONY: browser
browser:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then echo "==> installing chromium"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	else echo "chromium is missing: the playground's browser tests will be skipped"; fi

.PHONY: playground
playground: ## build the playground (needs node; the result is committed)
	@cd playground && npm ci --no-audit --no-fund && npm run build

demo: setup ## start the demo stack and stream a completion (ONCE=1: exit after it)
	@$(BIN)/outrider demo --port $(PORT) --grpc-port $(GRPC_PORT) --redis-url "$(REDIS_URL)" $(if $(ONCE),--once)

up: setup ## start the stack in the background; returns when it is ready
	@$(BIN)/outrider up --detach --model $(MODEL) --draft-model "$(DRAFT_MODEL)" --port $(PORT) \
	  --grpc-port $(GRPC_PORT) --redis-url "$(REDIS_URL)"

down: setup ## stop it
	@$(BIN)/outrider down

compose-up: ## build and start the containers (DRAFTERS=3 for three drafters)
	docker compose up --build -d --wait --scale drafter=$(or $(DRAFTERS),1)

compose-down: ## stop them and remove their volumes
	docker compose down -v

# These start whole stacks. Two at a time, with one thread for each model: two that wait for all cores wait for each other.
STACK_TESTS := $(addprefix tests/,e2e playground)
# These keep whatever cores there are busy, or ask that no round lacks its draft: one after another.
STORM_TESTS := $(addprefix tests/,chaos fuzz grid soak e2e/test_head_methods.py)
test: setup ## run all tests (TESTS=tests/gateway for some of them)
ifdef TESTS
	$(BIN)/python -m pytest $(TESTS)
else
	@# The others: two files at a time, on one thread each.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests $(patsubst %,--ignore=%,$(STACK_TESTS) $(STORM_TESTS))
	OUTRIDER_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(STACK_TESTS) $(STORM_TESTS:%=--ignore=%)
	$(BIN)/python -m pytest $(STORM_TESTS)
endif

chaos: setup ## random deaths, pauses and cut connections under load; REQUESTS=1000
	$(BIN)/python -m tests.chaos --requests $(REQUESTS)

wheels: setup ## build dist/outrider-*.whl and dist/outrider_client-*.whl
	$(BIN)/python packaging/build_wheels.py dist

.PHONY: soak
soak: setup ## a stack at saturation; memory, descriptors and latency must not grow; MINUTES=30
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

fuzz: setup ## strange and broken input at every door and parser; INPUTS=100000
	$(BIN)/python -m tests.fuzz --inputs $(INPUTS)

check: setup ## lint, format, types, and whether every test can be read
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --collect-only -qq

format: setup ## reformat
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## measure the whole stack against transformers (about 15 minutes)
	$(BIN)/python -m benchmarks.serving

gpu-report: setup ## everything that an NVIDIA GPU can show, in 8 minutes (GPU_REPORT=--help for its options)
	$(BIN)/python -m benchmarks.gpu_report $(GPU_REPORT)

.PHONY: docs
docs: setup ## build the documentation site into build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

models: setup ## train the demo family anew (hours on a laptop; see docs/models.md)
	$(BIN)/python -m training.make_models

clean: ## remove what setup made
	rm -rf $(VENV) outrider build dist .run *.egg-info
