# Everything without a GPU, and with no network beyond the package index. `make` lists the targets.

SHELL := /bin/bash
PYTHON_VENV := .venv/bin/python
PYTEST := $(PYTHON_VENV) -m pytest --timeout 900
# Tests start hundreds of processes: each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu setup-perf demo wire chaos test test-extras test-unit test-long test-fast check golden bench lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup:  ## install the pinned CPU stack and the tools of the tests into .venv; instant when that is done
	@./setup.sh cpu

setup-gpu:  ## install the pinned GPU stack into .venv in its place, on a node of a GPU cluster
	@./setup.sh gpu

setup-perf:  ## install the step times of other GPUs, engines and models into .venv
	@./setup.sh perf

demo: setup  ## serve, sweep and plot pd-spread, pd-pack and collocated on this machine
	@$(PYTHON_VENV) -m pdlab demo

wire: setup  ## prove the KV transfer here, as root: pack in memory, spread over 1 Gbit/s, a planted corruption
	@$(PYTHON_VENV) -m pdlab wire

chaos: setup  ## break 1P1D, 2P2D and (as root) two hosts in every way under load, and soak each; hours
	@$(PYTHON_VENV) -m pdlab chaos --launch

# Many of these wait rather than compute: more processes than the two cores of docs/testing.md, which has what each
# tier holds and how long it takes. Files begin in the order of tests/conftest.py, the longest first. The live ones take
# every core, one after the other: beside others they take longer than after them.
APART := -n 3 --dist loadfile --no-loadscope-reorder
FAST := $(PYTEST) -m "not live and not long" $(APART)
LIVE := $(PYTEST) -m "live and not long"

test: setup  ## 20 minutes: all but the long tests, the live ones (Ray, vLLM, NIXL) last; both parts run in any case
	@status=0; $(FAST) || status=$$?; $(LIVE) || status=$$?; exit $$status

test-long: setup  ## every test, with more kills, more faults and every serving path
	@export PDLAB_TEST_LONG=1; status=0; $(PYTEST) -m "not live" $(APART) || status=$$?; \
	$(PYTEST) -m live || status=$$?; exit $$status

# What machines and locks need not have: a browser, Prometheus, Grafana's types, the step times of other GPUs, wheels of
# the GPU stack.
EXTRAS := tests/report/test_html_in_browser.py tests/deploy/test_dashboard.py tests/contract/test_grafana_types.py \
	tests/contract/test_aiconfigurator.py tests/contract/test_gpu_wheels.py tests/sim/test_aic.py tests/benchmarks/test_scoring.py \
	tests/cli/test_startup.py tests/test_packaging.py

test-extras: setup  ## the tests that need Chromium, Prometheus (apt-get install chromium prometheus) or optional packages
	@./setup.sh extras
	@PYTHONPATH=.venv/extras PDLAB_GPU_WHEELS=.venv/extras/wheels $(PYTEST) -m "not long" -rs $(EXTRAS)

test-unit: setup  ## 3 minutes: the tests that need neither Ray nor vLLM, and start neither
	@PDLAB_TEST_UNIT=1 $(PYTEST) -m "not long" $(APART)

test-fast: setup  ## every test of `make test` that starts neither an engine nor a deployment
	@$(FAST)

check: setup  ## ruff, formatting, mypy --strict, imports between packages, names of classes and in docstrings
	@$(PYTHON_VENV) -m ruff check .
	@$(PYTHON_VENV) -m ruff format --check .
	@$(PYTHON_VENV) -m mypy
	@$(PYTEST) -q tests/test_architecture.py tests/test_lints.py

golden: setup  ## rewrite the stored renderings and tables; read `git diff tests` before keeping them
	@PDLAB_UPDATE_GOLDEN=1 $(PYTEST) -q -m golden

bench: setup  ## start-up and serving path against vLLM, timelines, transfers against NIXL, simulator, loading, report
	@$(PYTHON_VENV) benchmarks/startup.py
	@$(PYTHON_VENV) benchmarks/serving_path.py
	@$(PYTHON_VENV) benchmarks/timeline_cost.py --otl 64 --turns 12
	@$(PYTHON_VENV) benchmarks/nixl_reference.py
	@$(PYTHON_VENV) benchmarks/simulator.py
	@$(PYTHON_VENV) benchmarks/orderings.py
	@$(PYTHON_VENV) benchmarks/load_results.py
	@$(PYTHON_VENV) benchmarks/load_client.py
	@$(PYTHON_VENV) benchmarks/report.py

# What is pinned already stays, unless pyproject.toml rules it out; delete a .txt file to take everything anew.
# --universal writes one file for all Python versions, with markers where they differ.
LOCK = uv pip compile --quiet --universal --python-version 3.10 --no-annotate --no-emit-index-url \
	--no-emit-find-links --custom-compile-command "make lock"

# The tools of the tests without what pdlab itself depends on, which either stack has already.
DEV = sed -n '/^dev = \[/,/^\]/s/^ *"\(.*\)",$$/\1/p' pyproject.toml

lock:  ## compile the dependencies of pyproject.toml to requirements*.txt
	@PATH="$$PWD/.uv/bin:$$PATH" && ./setup.sh uv && \
	$(LOCK) pyproject.toml --extra serve -o requirements.txt && \
	$(LOCK) pyproject.toml --extra cpu -o requirements-cpu.txt --overrides overrides-cpu.txt \
		--excludes excludes-cpu.txt && \
	$(DEV) | $(LOCK) - -o requirements-dev.txt -c requirements.txt -c requirements-cpu.txt

clean:  ## remove caches and out/; .venv and bm_results/ stay
	@rm -rf out .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv/*' -not -path './.uv/*' -prune -exec rm -rf {} +
