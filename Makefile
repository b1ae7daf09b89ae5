# Every command installs what it needs, if it is not installed yet. `make` without arguments lists the commands.

# Commands use the oldest supported Python that is installed; make test-all also runs on the others.
found  = $(if $(shell tools/find-python $(1)),$(1))
MAIN   := $(or $(call found,3.11),$(call found,3.12),$(call found,3.13),3.11)
OTHERS := $(filter-out $(MAIN),3.12 3.13)
VENV   := .venv
PY     := $(VENV)/bin/python
BENCH  := .venv-bench
# The SDKs of docs/howto/llm.md are not in .venv: some of them need other versions of the same packages.
RECIPES := .venv-recipes
# `make run` uses an environment without the packages that only tests need, unless .venv exists.
RUN    := $(if $(wildcard $(PY)),$(VENV),.venv-run)
# Without compiled modules each process of a test compiles all that it imports: seconds of a core for a start.
unexport PYTHONDONTWRITEBYTECODE
# Arguments for pytest: make test ARGS="-k waiting -x"
ARGS   :=

.DEFAULT_GOAL := help
.PHONY: help run screenshots test test-all test-more test-package test-recipes test-others test-mutants lint format docs page site release manifests monitoring reference bench bench-compare mutants soak lock clean venv servers

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: ## start the service with demonstration traffic and its dashboard; Ctrl-C stops it
	@tools/make-venv $(RUN) $(MAIN) $(if $(filter $(VENV),$(RUN)),requirements.lock,requirements-run.lock)
	@$(RUN)/bin/python -m tidegate start examples/demo/service.yaml --demo

# `make test` leaves out the tests marked `slow`, and runs few random examples; `make test-all` adds what it left out.
test: servers venv ## run the tests on one Python version (the oldest installed), in about ten minutes
	@echo "== tests on Python $(MAIN)"
	@tools/run-tests $(PY) -m "not slow" --hypothesis-profile=quick $(ARGS)

test-all: test test-more ## run everything: also slow tests, more random examples, SDKs, other Python versions, mutants

test-more: servers venv ## run what test-all adds to test
	@echo "== slow tests, and more random examples, on Python $(MAIN)"
	@tools/run-tests $(PY) -m "slow or seeds or hypothesis" $(ARGS)
	@$(MAKE) --no-print-directory test-recipes test-others test-mutants

test-package: servers venv ## run all tests of one package: make test-package PACKAGE=budget
	@$(PY) -m pytest -n auto tests/$(PACKAGE) $(ARGS)

test-recipes: ## run the recipes of docs/howto/llm.md with the SDKs of OpenAI, Anthropic, Google, Mistral and others
	@tools/make-venv $(RECIPES) $(MAIN) tests/recipes/requirements.lock
	@tools/make-venv $(RECIPES)-openai2 $(MAIN) tests/recipes/requirements-openai2.lock
	@echo "== recipes of docs/howto/llm.md"
	@tools/run-tests $(RECIPES)/bin/python --one-process tests/recipes --ignore=tests/recipes/recipe_openai2.py
	@tools/run-tests $(RECIPES)-openai2/bin/python --one-process tests/recipes/recipe_openai2.py

# The other versions look for differences between versions, not for new examples: the newest runs what runs in one
# process, those between it and the oldest only the engine.
ENGINE := tests/core tests/engine tests/policy tests/headers tests/conformance
NEWEST := $(lastword $(OTHERS))
test-others: ## run tests on the other Python versions
	@for version in $(OTHERS); do \
	    if [ -z "$$(tools/find-python $$version)" ]; then echo "== Python $$version is not installed: its tests are skipped"; continue; fi; \
	    tools/make-venv $(VENV)-$$version $$version || exit 1; \
	    echo "== tests on Python $$version"; \
	    [ $$version = $(NEWEST) ] && what="" || what="$(ENGINE)"; \
	    tools/run-tests $(VENV)-$$version/bin/python --hypothesis-profile=quick -m "not slow and not process and not browser and not server" $$what $(ARGS) || exit 1; \
	done

test-mutants: servers venv ## inject faults into the lines of core/ and its ports that the latest commits changed
	@$(PY) tests/mutants/run.py --changed
	@tools/run-tests $(PY) --one-process -q -s tests/mutants/ports.py

lint: venv ## run ruff (every rule), mypy (strict), pyright (examples, completeness), the import contracts and tools/lint
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) tools/extract_examples.py build/examples
	@$(PY) -m mypy src tests examples build/examples $(wildcard bench/*.py tools/*.py)
	@$(PY) tools/check_pyright.py
	@$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command(["--no-logo"])'
	@$(PY) -m pytest -q -p no:cacheprovider tools/lint

format: venv ## format the code and apply automatic fixes
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

screenshots: venv servers ## write screenshots of the dashboard in ten situations to build/screenshots
	@$(PY) -m tests.service.dashboard.screenshots $(ARGS)

docs: venv ## run every code block of the README and the docs
	@$(PY) -m pytest tests/docs $(ARGS)

page: venv ## run the code blocks of one page and check its links: make page PAGE=docs/concepts/waiting.md
	@$(PY) -m tools.check_page $(PAGE)

site: ## build the documentation site into site/, strictly: every link and anchor must resolve
	@tools/make-venv .venv-site $(MAIN) tools/site.lock
	@.venv-site/bin/python tools/site_pages.py write build/pages
	@NO_MKDOCS_2_WARNING=1 .venv-site/bin/python -m mkdocs build --strict --clean $(ARGS)
	@.venv-site/bin/python tools/site_pages.py check site

release: ## build sdist and wheel, try each extra on each Python, check licences, write an SBOM; publishes nothing
	@tools/make-venv .venv-release $(MAIN) tools/release.lock
	@.venv-release/bin/python tools/release.py $(ARGS)

manifests: venv ## write deploy/kubernetes from the Helm chart
	@mkdir -p deploy/kubernetes
	@$(VENV)/bin/helm template tidegate deploy/helm/tidegate --namespace tidegate > deploy/kubernetes/tidegate.yaml

reference: venv ## write docs/reference from the code: commands, settings, metrics, header fields, log lines, JSON fields, errors
	@$(PY) tools/make_cli_page.py
	@$(PY) tools/site_reference.py
	@$(PY) tools/make_index.py

monitoring: venv ## write dashboards, alert rules and the runbook from deploy/monitoring.yaml
	@$(PY) tools/make_monitoring.py

bench: ## compare tidegate with the newest versions of other rate limiters in one run
	@tools/make-venv $(BENCH) $(MAIN)
	@$(BENCH)/bin/python -m pip install -qq --disable-pip-version-check --upgrade -r bench/requirements.txt
	@$(BENCH)/bin/python bench/run.py $(ARGS)

bench-compare: venv ## compare this tree with COMMIT (default: the parent) in one interleaved run
	@$(PY) -m bench.compare $(or $(COMMIT),HEAD~1) $(ARGS)

mutants: venv ## inject faults into core/ and count how many the tests detect
	@$(PY) tests/mutants/run.py $(ARGS)

soak: venv ## run the service on each store for ten minutes under traffic and faults, and check every response
	@$(PY) -m tests.soak $(ARGS)

# uv reads only PyPI here (no configuration of this machine), so that the hashes are those of the public packages.
COMPILE = env -i PATH="$$PATH" HOME="$${HOME:-/tmp}" .venv-lock/bin/uv pip compile pyproject.toml --no-config --system-certs \
          --universal --python-version 3.11 --generate-hashes --no-header --quiet
lock: ## resolve the dependencies and rewrite requirements.lock, requirements-run.lock and those of tests/recipes
	@python3 -m venv .venv-lock && .venv-lock/bin/python -m pip install -qq --disable-pip-version-check --upgrade uv
	@$(COMPILE) --extra dev --upgrade -o requirements.lock
	@$(COMPILE) --extra all --extra build --constraint requirements.lock --no-annotate -o requirements-run.lock
	@$(COMPILE) tests/recipes/requirements.in --extra httpx2 --extra egress --extra build --upgrade --no-annotate -o tests/recipes/requirements.lock
	@$(COMPILE) tests/recipes/requirements-openai2.in --extra httpx --extra build --upgrade --no-annotate \
	    -o tests/recipes/requirements-openai2.lock
	@$(COMPILE) tools/release.in --extra build --upgrade --no-annotate -o tools/release.lock
	@$(COMPILE) tools/site.in --extra all --extra build --constraint requirements.lock --no-annotate -o tools/site.lock
	@grep -c == tools/release.lock tools/site.lock requirements.lock requirements-run.lock tests/recipes/*.lock

clean: ## remove environments and caches
	@rm -rf .venv .venv-* .venv*.lock .*_cache .hypothesis .coverage* build dist site
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv:
	@tools/make-venv $(VENV) $(MAIN)

servers:
	@tests/servers/install-system-packages.sh
