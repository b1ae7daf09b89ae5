# Every command sets up what it needs; the second time it is quick. Bare `make` lists them.

# The oldest supported Python that is here does the work; make test also tries the others.
found  = $(if $(shell tools/find-python $(1)),$(1))
MAIN   := $(or $(call found,3.11),$(call found,3.12),$(call found,3.13),3.11)
OTHERS := $(filter-out $(MAIN),3.12 3.13)
VENV   := .venv
PY     := $(VENV)/bin/python
BENCH  := .venv-bench
# Who only wants to look gets an environment without what tests need.
RUN    := $(if $(wildcard $(PY)),$(VENV),.venv-run)
# Arguments for pytest: make test ARGS="-k waiting -x"
ARGS   :=

.DEFAULT_GOAL := help
.PHONY: help run screenshots test test-main test-others lint format docs bench mutants soak lock clean venv servers

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: ## the service with demonstration traffic and its dashboard; Ctrl-C ends it
	@tools/make-venv $(RUN) $(MAIN) $(if $(filter $(VENV),$(RUN)),requirements.lock,requirements-run.lock)
	@$(RUN)/bin/python -m tidegate start examples/demo/service.yaml --demo

test: servers test-main test-others ## the whole suite on Python 3.11, then most of it on 3.12 and 3.13 where they are found

test-main: venv ## the suite on one Python only (the oldest found)
	@echo "== tests on Python $(MAIN)"
	@$(PY) -m pytest -n auto $(ARGS)

# Fewer random examples than on the main Python, and not the protocols proved in virtual time or against dying servers
# and processes, nor proxies, the browser, forks and interrupted instructions: these look for differences between versions, not for new examples. What
# lies between the oldest and the newest gets the engine only.
LONG   := tests/outage tests/soak tests/stores/lease tests/budget/test_processes.py tests/budget/test_retention.py \
          tests/outbound/test_quota_processes.py tests/outbound/sources/test_kills.py tests/swarm/test_example.py \
          tests/swarm/test_processes.py tests/swarm/test_simulation.py tests/swarm/test_stress.py \
          tests/service/dashboard tests/service/test_proxies.py tests/service/test_real_envoy.py \
          tests/service/test_schemathesis.py tests/service/test_shared_store.py tests/service/test_workers.py \
          tests/engine/test_celery.py tests/engine/test_interrupts.py tests/engine/test_interrupts_of_servers.py \
          tests/engine/test_fork.py tests/engine/test_fork_users.py tests/stores/test_cancellation.py \
          tests/service/test_hostile_clients.py tests/service/resp/test_resp_clients.py tests/budget/test_schema.py tests/inbound/test_routers.py
ENGINE := tests/core tests/engine tests/policy tests/headers tests/conformance tests/docs
NEWEST := $(lastword $(OTHERS))
test-others: ## the suite on the other Pythons, with fewer random examples
	@for version in $(OTHERS); do \
	    if [ -z "$$(tools/find-python $$version)" ]; then echo "== Python $$version is not here: tests not run on it"; continue; fi; \
	    tools/make-venv $(VENV)-$$version $$version || exit 1; \
	    echo "== tests on Python $$version"; \
	    [ $$version = $(NEWEST) ] && what="$(LONG:%=--ignore=%)" || what="$(ENGINE) $(LONG:%=--ignore=%)"; \
	    $(VENV)-$$version/bin/python -m pytest -n auto --hypothesis-profile=quick $$what $(ARGS) || exit 1; \
	done

lint: venv ## ruff (everything), mypy (strict), pyright (examples, completeness), import contracts
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) tools/extract_examples.py build/examples
	@$(PY) -m mypy src tests examples build/examples $(wildcard bench/*.py tools/*.py)
	@$(PY) tools/check_pyright.py
	@$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command(["--no-logo"])'

format: venv ## let ruff format and fix what it can
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

screenshots: venv servers ## draw the dashboard into build/screenshots
	@$(PY) -m tests.service.dashboard.screenshots

docs: venv ## run every code block of the README and the docs
	@$(PY) -m pytest tests/docs $(ARGS)

bench: ## compare with other limiters, their newest versions, in one run
	@tools/make-venv $(BENCH) $(MAIN)
	@$(BENCH)/bin/python -m pip install -qq --disable-pip-version-check --upgrade -r bench/requirements.txt
	@$(BENCH)/bin/python bench/run.py $(ARGS)

mutants: venv ## plant faults in core/ and count how many the tests catch
	@$(PY) tests/mutants/run.py $(ARGS)

soak: venv ## run the service on each store for ten minutes under traffic and faults, and count every answer
	@$(PY) -m tests.soak $(ARGS)

# uv reads only PyPI here (no configuration of this machine), so that the hashes are those that everybody gets.
lock: ## resolve the dependencies again into requirements.lock and requirements-run.lock
	@python3 -m venv .venv-lock && .venv-lock/bin/python -m pip install -qq --disable-pip-version-check --upgrade uv
	@env -i PATH="$$PATH" HOME="$${HOME:-/tmp}" .venv-lock/bin/uv pip compile pyproject.toml --extra dev --upgrade \
	    --no-config --system-certs --universal --python-version 3.11 --generate-hashes --no-header --quiet -o requirements.lock
	@env -i PATH="$$PATH" HOME="$${HOME:-/tmp}" .venv-lock/bin/uv pip compile pyproject.toml --extra all --extra build \
	    --constraint requirements.lock --no-config --system-certs --universal --python-version 3.11 --generate-hashes \
	    --no-header --no-annotate --quiet -o requirements-run.lock
	@grep -c == requirements.lock requirements-run.lock

clean: ## remove environments and caches
	@rm -rf .venv .venv-* .venv*.lock .*_cache .hypothesis .coverage* build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv:
	@tools/make-venv $(VENV) $(MAIN)

servers:
	@tests/servers/install-system-packages.sh
