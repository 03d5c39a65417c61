# Every target needs only python3 and pip. `make` alone lists the targets; CONTRIBUTING.md lists further commands.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
READY := $(VENV)/.ready
# Compiled modules and their types; a change recompiles them.
TYPES := $(wildcard src/headgate/*.pxd src/headgate/*/*.pxd src/headgate/*/*/*.pxd)
CORE := hatch_build.py $(TYPES) $(TYPES:.pxd=.py)
COMPILED := src/headgate/*.so src/headgate/*/*.so src/headgate/*/*/*.so
RUN_READY := $(VENV)/.run-ready
# Library, server and services are separate distributions.
PROJECTS := pyproject.toml server/pyproject.toml services/pyproject.toml
CHECKED := hatch_build.py src server services tests tools $(wildcard benchmarks examples)

.DEFAULT_GOAL := help
.PHONY: help setup run tour test check format docs bench dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## install everything into .venv

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(READY): $(PROJECTS) constraints.txt $(CORE) | $(BIN)/pip
	@rm -f $(COMPILED)
	@echo "Installing everything and compiling the core; HEADGATE_PURE=1 leaves it plain Python."
	@$(PIP) install --constraint constraints.txt --editable '.[dev]' --editable './server[all]' --editable './services[all]'
	@$(BIN)/headgate version
	@touch $(RUN_READY) $@

# Only the packages of the demo. The core stays plain Python, so that nothing is compiled, and the build backend is installed
# once for all three projects.
$(RUN_READY): $(PROJECTS) constraints.txt $(CORE) | $(BIN)/pip
	@echo "Installing dependencies; this takes about half a minute the first time."
	@$(PIP) install --constraint constraints.txt hatchling editables
	@rm -f $(COMPILED)  # compiled from older sources
	@HEADGATE_PURE=1 $(PIP) install --no-compile --no-build-isolation --constraint constraints.txt --editable . --editable ./server --editable './services[all]'
	@touch $@

run: $(RUN_READY) ## the demo: servers, services, dashboard and traffic, until Ctrl-C
	@$(BIN)/headgate demo

tour: $(RUN_READY) ## see real decisions in the terminal
	$(BIN)/headgate tour

test: $(READY) ## make check and every suite, the time of each, and the coverage of the core
	$(BIN)/python tools/run_tests.py

check: $(READY) ## formatting, lint, types, generated code
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy
	$(BIN)/python tools/unasync.py --check

format: $(READY) ## format, fix what lint can fix, regenerate the sync code
	$(BIN)/python tools/unasync.py
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

docs: $(RUN_READY) ## build the documentation site into build/site; a dead link is an error
	@$(BIN)/python tools/install_extra.py docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(READY) ## compare speed and memory with other limiters
	$(BIN)/python tools/install_extra.py bench
	$(BIN)/python -m benchmarks

dist: $(READY) ## build sdists and wheels of all three projects into dist/, check and use them
	$(BIN)/python tools/install_extra.py dist
	$(BIN)/python tools/dist.py

clean: ## remove all generated files
	rm -rf $(VENV) .venv-adapters $(COMPILED) tests/cloudflare/node_modules .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find src server services tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
