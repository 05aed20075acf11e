# Everything starts here: `make demo` shows the product, `make test` proves it. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
ONCE ?=
.DEFAULT_GOAL := help

PROTO_FILES := $(wildcard protos/outrider/v1/*.proto)
SETUP_STAMP := $(VENV)/.setup-done
PROTO_STAMP := $(VENV)/.protos-done

.PHONY: help setup protos demo up down test check bench models clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(SETUP_STAMP): pyproject.toml
	@echo "==> creating $(VENV) and installing packages (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q --upgrade pip
	@# torch first and pinned: a bare `torch` pulled in by another package may be another build.
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -e '.[gateway,engine,dev]'
	@touch $@

$(PROTO_STAMP): $(PROTO_FILES) $(SETUP_STAMP)
	$(BIN)/python -m grpc_tools.protoc -I protos --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. $(PROTO_FILES)
	@touch $@

setup: $(SETUP_STAMP) protos ## create .venv and install everything
protos: $(PROTO_STAMP) ## generate the gRPC code from protos/
