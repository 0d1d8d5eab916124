# One command each, the same for people and for CI. `make` alone says what there is.
# Every target prepares .venv by itself, and does so again only after pyproject.toml has changed.

PYTHON ?= python3
MODEL ?= models/gemma-3-270m.toml
MESH ?= mesh_configs/1p1d-cpu.toml
# A file of tests stays in one process, so that what it compiles is compiled once. `make test` runs in three
# parts: executables take memory maps, and the kernel gives a process 65,530 (vm.max_map_count).
PYTEST = $(BIN)/python -m pytest --numprocesses 2 --dist loadfile
override VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --root-user-action ignore

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-fast check bench proto field-reports clean

help:  ## show this list
	@echo "make demo        a real model answers five requests, prefill and decode apart (CPU, no GPU needed)"
	@echo "make serve       the same server, kept running   (MODEL=$(MODEL) MESH=$(MESH))"
	@echo "make test        every test; needs no model and no GPU"
	@echo "make test-fast   the tests for daily work"
	@echo "make check       format, lint, types"
	@echo "make bench       the benchmarks that run on a laptop"
	@echo "make proto       generate the gRPC stubs from jpd/rpc/*.proto"
	@echo "make field-reports  write docs/field_reports.md from the tests"
	@echo "make clean       remove .venv and caches"
	@echo
	@echo "Another Python: make test PYTHON=python3.12"

demo: $(VENV)/.demo
	@$(BIN)/python -m jpd.bench.demo --model $(MODEL) --mesh $(MESH)

serve: $(VENV)/.demo
	@$(BIN)/jpd serve --model $(MODEL) --mesh $(MESH) --http-port 8000 --grpc-port 8001

test: $(VENV)/.dev
	$(PYTEST) tests/engine
	$(PYTEST) tests/launch
	$(PYTEST) tests --ignore tests/engine --ignore tests/launch

test-fast: $(VENV)/.dev
	$(PYTEST) -m "not slow" tests/engine
	$(PYTEST) -m "not slow" tests --ignore tests/engine

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.demo
	$(BIN)/jpd bench all

proto: $(VENV)/.dev
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
	  jpd/rpc/jpd.proto jpd/rpc/worker.proto jpd/rpc/kv.proto

field-reports: $(VENV)/.dev
	$(BIN)/python -m tests.support.field_reports

clean:
	rm -rf .venv .cache build dist .ruff_cache .pytest_cache .mypy_cache *.egg-info

$(VENV)/.python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "jpd needs Python 3.11 or newer; PYTHON=$(PYTHON) is $$("$(PYTHON)" --version 2>&1)."; \
	  echo "Name another one: make PYTHON=python3.12"; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments. On Debian: apt-get install python3-venv"; \
	  exit 1; }
	@echo "preparing $(VENV) ..."
	@"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(VENV)/.demo $(VENV)/.dev: $(VENV)/.%: pyproject.toml $(VENV)/.python
	@echo "installing jpd[$*] into $(VENV) (minutes the first time: JAX and its friends) ..."
	@$(PIP) --editable '.[$*]'
	@touch $@
