# Every command it takes to work on batchmill. `make` alone lists them.
#
# All of them need Python 3.11 or newer, make, and a package registry that pip can reach. What they
# install goes into .venv, from requirements/*.lock: exact versions, each checked against its hash.
# Spark needs Java 17 or newer besides, and some tests PostgreSQL, Prometheus, Chromium, or Maven for Kafka's jars:
# scripts/system-packages.sh finds them or, as root where there is apt-get, installs them.

# The first Python that is new enough. To name another one: make test PYTHON=/path/to/python3
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; \
	done)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
QUIET := --quiet --disable-pip-version-check --no-input
INSTALL := $(PIP) install $(QUIET)
# Packages that come as source (pyspark) are built with what build.lock pins, not with what is newest.
INSTALL_LOCKED := $(INSTALL) --no-build-isolation --require-hashes -r
CHECKED := $(wildcard src tests benchmarks examples scripts)
SOURCES := $(shell find src -type f ! -name '*.py[cod]')
ARGS ?=
# Two processes run the tests, file by file; `make test WORKERS=` for one, as a debugger needs it.
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder

# A developer's environment runs the source tree; CI runs what users get, the built wheel.
ifdef CI
PACKAGE := $(VENV)/.package-wheel
else
PACKAGE := $(VENV)/.package-editable
endif

.DEFAULT_GOAL := help
.PHONY: help run queues test test-system docs bench lint format lock build dist clean
# Two pips must not write to one environment at once, so `make -j` changes nothing here.
.NOTPARALLEL:
.DELETE_ON_ERROR:

help: ## list the commands
	@echo "batchmill: make <command>   (ARGS=... is passed on to run, test and bench)"
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | while IFS='	' read -r name what; do \
		printf '  %-12s %s\n' "$$name" "$$what"; done

run: $(VENV)/.run-installed $(PACKAGE) ## a simulated shop's spans in, its metrics out, for a minute (FOREVER=1: until Ctrl-C)
	@$(FIND_JAVA)
	@$(WITH_SYSTEM) $(BIN)/batchmill run --demo $(if $(FOREVER),forever,60) $(ARGS)

queues: $(VENV)/.run-installed $(PACKAGE) ## watch four queues at work, in the terminal
	@$(BIN)/python -m examples.queue_demo $(ARGS)

test: .test-setup ## run the tests, but for the long ones (ARGS="tests/queue -k fork": some of them)
	@$(WITH_SYSTEM) $(BIN)/pytest $(WORKERS) --ignore=tests/system $(ARGS)

test-system: .test-setup ## run the long tests: kills, whole runs, Kafka, a cluster
	@$(WITH_SYSTEM) $(BIN)/pytest $(WORKERS) $(if $(ARGS),$(ARGS),tests/system)

.PHONY: .test-setup
.test-setup: $(VENV)/.run-installed $(VENV)/.test-installed $(PACKAGE)
	@$(FIND_JAVA) || echo "==> without Java, the tests that start Spark are skipped" >&2
	@$(FIND_POSTGRES) || echo "==> without initdb, the tests of the PostgreSQL store are skipped" >&2
	@$(FIND_PROMETHEUS) || echo "==> without prometheus, the tests that start one are skipped" >&2
	@$(FIND_CHROMIUM) || echo "==> without chromium, the tests of the pages $(if $(CI),fail,are skipped)" >&2
	@$(KAFKA_JARS) || echo "==> without its jars, the tests with a Kafka broker $(if $(CI),fail,are skipped)" >&2
	@$(SPARK_ARCHIVE)

docs: $(VENV)/.test-installed ## make the site of the documentation, in build/site
	@$(BIN)/mkdocs build --strict --quiet
	@echo "==> build/site/index.html"

bench: $(VENV)/.run-installed $(VENV)/.bench-installed $(PACKAGE) ## measure every part against its peers
	@$(BIN)/python -m benchmarks.queue $(ARGS)
	@$(BIN)/python -m benchmarks.pressure $(ARGS)
	@$(BIN)/python -m benchmarks.flows $(ARGS)
ifneq ($(wildcard benchmarks/pipeline.py),)
	@$(FIND_JAVA)
	@$(WITH_SYSTEM) $(BIN)/python -m benchmarks.pipeline $(ARGS)
	@$(WITH_SYSTEM) $(BIN)/python -m benchmarks.ingest $(ARGS)
	@$(WITH_SYSTEM) $(BIN)/python -m benchmarks.export $(ARGS)
	@$(BIN)/python -m benchmarks.query $(ARGS)
endif

lint: $(VENV)/.dev-installed ## check style, format, types and the direction of imports
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy $(CHECKED)
	PYTHONPATH=src $(BIN)/lint-imports --no-logo

format: $(VENV)/.dev-installed ## format the code, and mend what ruff can mend
	$(BIN)/ruff check --fix-only $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

build: $(VENV)/.build-installed ## build the sdist and the wheel into dist/
	@rm -rf dist
	@$(BIN)/python -m hatchling build -d dist

dist: build

# Locking: one resolution for everything (dev.lock); the other files are cut from it, so that
# all agree: uv keeps the versions it finds in the file it is about to write.
UV_VERSION := 0.13.7
COMPILE := $(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 \
	--generate-hashes --no-emit-index-url --no-emit-find-links --system-certs \
	--custom-compile-command 'make lock'
RUN_EXTRAS := --extra cli --extra demo --extra export --extra kafka --extra otlp --extra postgres \
	--extra spark --extra spool --extra web

lock: $(VENV)/.uv-$(UV_VERSION) ## remake requirements/*.lock (UPGRADE=1: with the newest versions)
	@$(COMPILE) $(if $(UPGRADE),--upgrade) $(RUN_EXTRAS) --group lint -o requirements/dev.lock
	@for name in build run test bench; do cp requirements/dev.lock requirements/$$name.lock || exit 1; done
	@$(COMPILE) --group build -o requirements/build.lock
	@$(COMPILE) $(RUN_EXTRAS) -o requirements/run.lock
	@$(COMPILE) --group test -o requirements/test.lock
	@$(COMPILE) --group bench -o requirements/bench.lock

$(VENV)/.uv-$(UV_VERSION): | $(VENV)/.made
	@echo "==> $(VENV): installing uv $(UV_VERSION)"
	@$(INSTALL) uv==$(UV_VERSION)
	@touch $@

# The environment: a stamp file in .venv stands for each thing installed.
$(VENV)/.made:
	@python='$(PYTHON)'; \
	if [ -z "$$python" ] || ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		echo "batchmill needs Python 3.11 or newer; $${python:-python3} is $$("$${python:-python3}" --version 2>/dev/null || echo missing)"; \
		echo "Install a newer one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; \
		exit 1; \
	elif ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "$$python cannot make virtual environments: its venv module is missing."; \
		echo "On Debian and Ubuntu: apt-get install python3-venv"; \
		exit 1; \
	fi >&2; \
	echo "==> $(VENV): making it with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)
	@touch $@

$(VENV)/.build-installed: requirements/build.lock | $(VENV)/.made
	@echo "==> $(VENV): installing $<"
	@$(INSTALL_LOCKED) $<
	@touch $@

$(VENV)/.run-installed $(VENV)/.test-installed $(VENV)/.bench-installed $(VENV)/.dev-installed: \
$(VENV)/.%-installed: requirements/%.lock | $(VENV)/.build-installed
	@echo "==> $(VENV): installing $<"
	@$(INSTALL_LOCKED) $<
	@touch $@

# build.lock brings hatchling, which builds the package.
$(VENV)/.package-editable: pyproject.toml | $(VENV)/.build-installed
	@echo "==> $(VENV): installing batchmill, editable"
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.package-wheel
	@touch $@

$(VENV)/.package-wheel: pyproject.toml README.md LICENSE $(SOURCES) | $(VENV)/.build-installed
	@echo "==> $(VENV): installing batchmill, as a wheel"
	@rm -rf build/wheel
	@$(PIP) wheel $(QUIET) --no-deps --no-build-isolation -w build/wheel .
	@$(INSTALL) --no-deps --force-reinstall build/wheel/*.whl
	@rm -f $(VENV)/.package-editable
	@touch $@

# What pip cannot bring. A file in .venv says where each thing is; it is looked for again when it is
# no longer there, or when JAVA_HOME says otherwise.
# $(call find,NAME,PROGRAM)
find = [ -s $(VENV)/.$(1)-home ] && [ -x "$$(cat $(VENV)/.$(1)-home)/bin/$(2)" ] || \
	scripts/system-packages.sh $(1) >$(VENV)/.$(1)-home || { rm -f $(VENV)/.$(1)-home; false; }
FIND_JAVA = [ "$${JAVA_HOME:-}" = "$$(cat $(VENV)/.java-home 2>/dev/null)" ] || [ -z "$${JAVA_HOME:-}" ] \
	|| rm -f $(VENV)/.java-home; $(call find,java,java)
FIND_POSTGRES = $(call find,postgres,initdb)
FIND_PROMETHEUS = $(call find,prometheus,prometheus)
FIND_MAVEN = $(call find,maven,mvn)
FIND_CHROMIUM = $(call find,chromium,chromium)
WITH_SYSTEM = JAVA_HOME="$$(cat $(VENV)/.java-home 2>/dev/null)" \
	PATH="$$PATH:$$(cat $(VENV)/.postgres-home 2>/dev/null)/bin:$$(cat $(VENV)/.maven-home 2>/dev/null)/bin:$$(cat $(VENV)/.prometheus-home 2>/dev/null)/bin:$$(cat $(VENV)/.chromium-home 2>/dev/null)/bin"

# Kafka's jars lie in a cache outside of the repository (see tests/kit/kafka_jars.py): Maven is needed once.
KAFKA_JARS = [ ! -f tests/kit/kafka_jars.py ] || $(BIN)/python -m tests.kit.kafka_jars --there || { \
	{ $(FIND_MAVEN); } && echo "==> getting Kafka's jars from Maven Central" && \
	$(WITH_SYSTEM) $(BIN)/python -m tests.kit.kafka_jars; }

# Spark starts in half the time from an archive of its classes (see tests/kit/jvm.py).
ARCHIVE := $(VENV)/spark.jsa
SPARK_ARCHIVE = [ ! -s $(VENV)/.java-home ] || [ ! -f tests/kit/jvm.py ] || \
	[ $(ARCHIVE) -nt $(VENV)/.run-installed -a $(ARCHIVE) -nt $(VENV)/.java-home ] || { \
	echo "==> $(VENV): making a class archive, so that Spark starts quickly in the tests"; \
	$(WITH_SYSTEM) $(BIN)/python -m tests.kit.jvm $(ARCHIVE) || \
	echo "==> that failed; the tests go on without it" >&2; }

clean: ## remove .venv and everything that was built or cached
	@rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
