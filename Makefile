# Every target sets itself up from plain python3 and pip. `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
READY := $(VENV)/.ready
# The compiled modules and their types; a change of these compiles them again.
TYPES := $(wildcard src/headgate/*.pxd src/headgate/*/*.pxd src/headgate/*/*/*.pxd)
CORE := hatch_build.py $(TYPES) $(TYPES:.pxd=.py)
COMPILED := src/headgate/*.so src/headgate/*/*.so src/headgate/*/*/*.so
RUN_READY := $(VENV)/.run-ready
BENCH_READY := $(VENV)/.bench-ready
MUTATE_READY := $(VENV)/.mutate-ready
DIST_READY := $(VENV)/.dist-ready
BROWSER_READY := $(VENV)/.browser-ready
# Server and services are distributions of their own; the library stands alone.
PROJECTS := pyproject.toml server/pyproject.toml services/pyproject.toml
CHECKED := hatch_build.py src server services tests tools $(wildcard benchmarks examples)

.DEFAULT_GOAL := help
.PHONY: help setup run tour test check format docs docs-serve dist test-versions constraints bench mutate clean test-browser test-cloudflare faults fuzz model

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## install everything into .venv

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(READY): $(PROJECTS) constraints.txt $(CORE) | $(BIN)/pip
	@rm -f $(COMPILED)
	$(PIP) install --constraint constraints.txt --editable '.[dev]' --editable './server[all]' --editable './services[all]'
	@$(BIN)/headgate version
	@touch $(RUN_READY) $@

# Only what the demo runs. The core stays plain Python, so neither Cython nor a compiler is waited for; and the build backend is
# installed once, not once for each project in an environment of its own.
$(RUN_READY): $(PROJECTS) constraints.txt $(CORE) | $(BIN)/pip
	@echo "Installing what the demo needs; this takes about half a minute the first time."
	$(PIP) install --constraint constraints.txt hatchling editables
	@rm -f $(COMPILED)  # made from older sources, or this rule would not run
	HEADGATE_PURE=1 $(BIN)/pip --disable-pip-version-check install --no-compile --no-build-isolation --constraint constraints.txt --editable . --editable ./server --editable './services[all]'
	@touch $@

$(BENCH_READY): $(READY)
	$(PIP) install --constraint constraints.txt --editable '.[dev,bench]'
	@touch $@

$(MUTATE_READY): $(READY)
	$(PIP) install --constraint constraints.txt --editable '.[dev,mutate]'
	@touch $@

$(DIST_READY): $(READY)
	$(PIP) install --constraint constraints.txt --editable '.[dev,dist]'
	@touch $@

$(BROWSER_READY): $(READY)
	$(PIP) install --constraint constraints.txt --editable '.[dev,browser]'
	@touch $@

run: $(RUN_READY) ## the demo: servers, services, dashboard and traffic, until Ctrl-C
	@$(BIN)/headgate demo

tour: $(RUN_READY) ## see real decisions in the terminal
	$(BIN)/headgate tour

test: $(READY) ## make check and every suite, the time of each, and the coverage of the core
	$(BIN)/python tools/run_tests.py

test-browser: $(BROWSER_READY) ## the dashboard in a real browser (needs Chromium or Chrome)
	$(BIN)/pytest -q tests/browser/check_*.py

test-cloudflare: $(READY) ## the Cloudflare adapter against a real workerd (needs Node 20 or later)
	cd tests/cloudflare && npm install --no-audit --no-fund --no-package-lock --loglevel=error
	$(BIN)/pytest -q tests/cloudflare/check_workerd.py

check: $(READY) ## formatting, lint, types, generated code
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy
	$(BIN)/python tools/unasync.py --check

format: $(READY) ## format, fix what lint can fix, regenerate the sync code
	$(BIN)/python tools/unasync.py
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

docs: $(READY) ## build the documentation site into build/site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-serve: $(READY) ## serve the site at http://127.0.0.1:8000, built anew when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

dist: $(DIST_READY) ## build sdists and wheels of all three projects into dist/, check and use them
	$(BIN)/python tools/dist.py

test-versions: ## the unit suite on every Python from 3.11 to 3.14 that is installed
	$(PYTHON) tools/versions.py

bench: $(BENCH_READY) ## compare speed and memory with other limiters
	$(BIN)/python -m benchmarks

mutate: $(MUTATE_READY) ## break the core, place by place: how much of it do tests notice? (MUTANTS=0 for all)
	$(BIN)/python tools/mutate.py $(if $(MUTANTS),--mutants $(MUTANTS))

faults: $(READY) ## every store under faults for ten minutes (FAULT_MINUTES=60 for more), every call explained
	$(BIN)/python -m tests.faults

fuzz: $(READY) ## strange quotas, policies, fields, keys, arguments and bodies, ten minutes each (FUZZ_MINUTES=)
	FUZZ_MINUTES=$${FUZZ_MINUTES:-10} $(BIN)/pytest -q -rP tests/fuzz

model: $(READY) ## the model of holds and limit changes, checked with Spin (needs spin and gcc)
	$(BIN)/python tools/model.py

constraints: ## pin today's versions of everything that any extra needs
	$(PYTHON) tools/pin.py

clean: ## remove everything that make has made
	rm -rf $(VENV) $(COMPILED) tests/cloudflare/node_modules .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find src server services tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
