# The commands for working on batchmill. `make` alone lists them.
#
# They need Python 3.11 or newer, make, and a package index that pip can reach. They install into .venv,
# from requirements/*.lock: exact versions, verified by hash. Spark also needs Java 17 or newer, the quick
# OTLP decoder a C compiler; some tests need PostgreSQL, Prometheus, Alertmanager, Chromium, or Maven (for the jars of Kafka and Hadoop). scripts/system-packages.sh finds them
# or, as root on a machine with apt-get, installs them.

# The first Python that is new enough. To use another one: make test PYTHON=/path/to/python3
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; \
	done)

VENV := .venv
OLDEST := $(VENV)/oldest
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
QUIET := --quiet --disable-pip-version-check --no-input
INSTALL := $(PIP) install $(QUIET)
# Packages published as source (pyspark) are built with the versions in build.lock, not with the newest.
INSTALL_LOCKED := $(INSTALL) --no-build-isolation --require-hashes -r
CHECKED := $(wildcard src tests benchmarks examples scripts)
SOURCES := $(shell find src -type f ! -name '*.py[cod]' ! -name wire.lib)
ARGS ?=
# Three processes run the tests, one file at a time each: on two cores, since many tests wait for other
# processes. `make test WORKERS=` runs one, for a debugger.
WORKERS ?= -n 3 --dist loadfile --no-loadscope-reorder

# Developers install the source tree as editable; CI installs the built wheel, as users do.
ifdef CI
PACKAGE := $(VENV)/.package-wheel
else
PACKAGE := $(VENV)/.package-editable
endif

.DEFAULT_GOAL := help
.PHONY: help run queues test test-system test-oldest soak docs bench lint format lock audit build dist clean
# Two pip processes must not write to one environment at the same time, so `make -j` has no effect.
.NOTPARALLEL:
.DELETE_ON_ERROR:

help: ## list the commands
	@echo "batchmill: make <command>   (ARGS=... is passed to run, queues, test, test-system, test-oldest, soak and bench)"
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | while IFS='	' read -r name what; do \
		printf '  %-12s %s\n' "$$name" "$$what"; done

run: $(VENV)/.run-installed $(PACKAGE) ## run the pipeline on the spans of a simulated shop, for a minute (FOREVER=1: until Ctrl-C)
	@$(FIND_JAVA)
	@$(WITH_SYSTEM) $(BIN)/batchmill run --demo $(if $(FOREVER),forever,60) $(ARGS)

queues: $(VENV)/.run-installed $(PACKAGE) ## show four queues live in the terminal
	@$(BIN)/python -m examples.queue_demo $(ARGS)

# Tests start many processes, which load compiled modules, whatever the environment says.
test test-system test-oldest: export PYTHONDONTWRITEBYTECODE :=

test: .test-setup ## run the tests, except the long ones (ARGS="tests/queue -k fork": only some)
	@$(WITH_SYSTEM) $(BIN)/pytest $(WORKERS) -m "not system" $(ARGS)

test-system: .test-setup ## run the long tests: kills, complete runs, Kafka, a cluster, most pages in a browser, property tests with many examples
	@$(TEST_JARS) || echo "==> without their jars, the tests with Kafka, HDFS and S3 $(if $(CI),fail,are skipped)" >&2
	@$(COLLECTOR) || echo "==> without the OpenTelemetry Collector, the tests with one $(if $(CI),fail,are skipped)" >&2
	@$(WITH_SYSTEM) $(BIN)/pytest $(WORKERS) -m "system or property" $(ARGS)

# What depends on PySpark: jobs of batches, their commits by part, crashes and stops, sessions, DataFrames,
# a cluster, HDFS, a Kafka source; Iceberg, whose runtime does not exist for the newest PySpark. That any
# split gives the same, and what a topic may hold, does not depend on it. Without S3: the jars that the tests
# have for it are of the Hadoop of the newest PySpark.
SPLIT := tests/spark/batch/test_any_split.py
URIS := tests/system/cluster/test_uris.py
OLDEST_TESTS := $(SPLIT)::test_one_batch_equals_the_oracle \
	$(SPLIT)::test_spans_of_one_trace_may_come_in_different_batches \
	$(SPLIT)::test_waiting_spans_survive_a_restart_between_batches \
	$(patsubst %,tests/spark/batch/test_%.py,dedup on_rows parts read_once) \
	$(patsubst %,tests/spark/files/test_%.py,paths quarantine remote_stream) \
	$(patsubst %,tests/spark/runtime/test_%.py,backfill commit_parts crash restart session stop) \
	tests/spark/test_metrics.py tests/spark/test_iceberg.py tests/system/cluster/test_cluster.py \
	$(URIS)::test_executors_share_nothing_but_the_file_system_and_the_driver[hdfs] \
	$(URIS)::test_a_killed_driver_continues[hdfs] \
	tests/system/test_pipeline_kafka.py::test_spans_of_a_topic_give_the_store_of_the_oracle

# Batches with random splits are made of the same steps, on any PySpark.
OLDEST_WITHOUT := --deselect tests/spark/batch/test_dedup.py::test_any_duplication_in_any_split_equals_each_span_once

test-oldest: .test-setup $(OLDEST)/.installed ## run the tests that depend on PySpark most on the oldest PySpark
	@$(TEST_JARS) || echo "==> without their jars, the tests with a Kafka broker, HDFS and Iceberg $(if $(CI),fail,are skipped)" >&2
	@$(WITH_SYSTEM) PYTHONPATH=$(CURDIR)/$(OLDEST) $(BIN)/pytest $(WORKERS) $(or $(ARGS),$(OLDEST_TESTS) $(OLDEST_WITHOUT))

soak: .test-setup $(VENV)/.bench-installed ## a run under load, kills, full disks and strangers for 30 minutes (ARGS="--hours 2 --seed 5")
	@$(WITH_SYSTEM) $(BIN)/python -m tests.soak $(ARGS)

.PHONY: .test-setup
.test-setup: $(VENV)/.run-installed $(VENV)/.test-installed $(PACKAGE)
	@$(FIND_JAVA) || echo "==> without Java, the tests that start Spark are skipped" >&2
	@$(FIND_POSTGRES) || echo "==> without initdb, the tests of the PostgreSQL store are skipped" >&2
	@$(FIND_PROMETHEUS) || echo "==> without prometheus, the tests that start a Prometheus server are skipped" >&2
	@$(FIND_ALERTMANAGER) || echo "==> without prometheus-alertmanager, the tests that start an Alertmanager are skipped" >&2
	@$(FIND_CHROMIUM) || echo "==> without chromium, the tests of the web UI $(if $(CI),fail,are skipped)" >&2
	@$(COMPILE_TESTS) & $(SPARK_ARCHIVE); wait

docs: $(VENV)/.test-installed ## build the documentation site in build/site
	@$(BIN)/mkdocs build --strict --quiet
	@echo "==> build/site/index.html"

bench: $(VENV)/.run-installed $(VENV)/.bench-installed $(PACKAGE) ## run the benchmarks against named peers
	@$(BIN)/python -m benchmarks.queue $(ARGS)
	@$(BIN)/python -m benchmarks.pressure $(ARGS)
	@$(BIN)/python -m benchmarks.flows $(ARGS)
	@$(BIN)/python -m benchmarks.aggregate $(ARGS)
ifneq ($(wildcard benchmarks/pipeline/__main__.py),)
	@$(FIND_JAVA)
	@$(WITH_SYSTEM) $(BIN)/python -m benchmarks.pipeline $(ARGS)
	@$(WITH_SYSTEM) $(BIN)/python -m benchmarks.ingest $(ARGS)
	@$(WITH_SYSTEM) $(BIN)/python -m benchmarks.export $(ARGS)
	@$(BIN)/python -m benchmarks.query $(ARGS)
endif

lint: $(VENV)/.dev-installed ## check style, format, types and import rules
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy $(CHECKED)
	PYTHONPATH=src $(BIN)/lint-imports --no-logo

format: $(VENV)/.dev-installed ## format the code, and apply ruff's fixes
	$(BIN)/ruff check --fix-only $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

audit: | $(VENV)/.made ## look up known vulnerabilities of all locked packages, where PyPI can be reached
	@$(BIN)/python scripts/audit.py requirements/*.lock

build: $(VENV)/.build-installed ## build the sdist and the wheel into dist/
	@rm -rf dist
	@$(BIN)/python -m hatchling build -d dist

dist: build $(VENV)/.run-installed ## the same, and dist/sbom.cdx.json: all dependencies with hashes and licences
	@$(BIN)/python scripts/sbom.py $(BILLED) dist/sbom.cdx.json

# Locking: dev.lock is resolved first, with everything. The other files start as copies of it, and uv
# keeps the versions that it finds in the output file; so all files have the same versions. jre.lock has the
# one extra that nothing here installs, a Java of 100 MB: it is for the bill of materials and the audit.
UV_VERSION := 0.13.7
COMPILE := $(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 \
	--generate-hashes --no-emit-index-url --no-emit-find-links --system-certs \
	--custom-compile-command 'make lock'
BILLED := requirements/run.lock requirements/jre.lock
RUN_EXTRAS := --extra aggregate --extra alerts --extra cli --extra demo --extra export --extra kafka --extra otel \
	--extra otlp --extra postgres --extra prometheus --extra spark --extra spool --extra web

lock: $(VENV)/.uv-$(UV_VERSION) ## update requirements/*.lock (UPGRADE=1: to the newest versions)
	@$(COMPILE) $(if $(UPGRADE),--upgrade) $(RUN_EXTRAS) --group lint -o requirements/dev.lock
	@for name in build run test bench; do cp requirements/dev.lock requirements/$$name.lock || exit 1; done
	@$(COMPILE) --group build -o requirements/build.lock
	@$(COMPILE) $(RUN_EXTRAS) -o requirements/run.lock
	@$(COMPILE) --group test -o requirements/test.lock
	@$(COMPILE) --group bench -o requirements/bench.lock
	@$(COMPILE) --group oldest --no-deps -o requirements/oldest.lock
	@$(COMPILE) $(if $(UPGRADE),--upgrade) --extra jre -o requirements/jre.lock

$(VENV)/.uv-$(UV_VERSION): | $(VENV)/.made
	@echo "==> $(VENV): installing uv $(UV_VERSION)"
	@$(INSTALL) uv==$(UV_VERSION)
	@touch $@

# The environment: .venv has a stamp file for each installed part.
$(VENV)/.made:
	@python='$(PYTHON)'; \
	if [ -z "$$python" ] || ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		echo "batchmill needs Python 3.11 or newer; $${python:-python3} is $$("$${python:-python3}" --version 2>/dev/null || echo missing)"; \
		echo "Install a newer one, or pass its path: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; \
		exit 1; \
	elif ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "$$python cannot create virtual environments: its venv module is missing."; \
		echo "On Debian and Ubuntu: apt-get install python3-venv"; \
		exit 1; \
	fi >&2; \
	echo "==> $(VENV): creating it with $$("$$python" --version)"; \
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

# The oldest PySpark, in a folder of its own; with PYTHONPATH it hides that of .venv.
$(OLDEST)/.installed: requirements/oldest.lock | $(VENV)/.build-installed
	@echo "==> $(OLDEST): installing $<"
	@rm -rf $(OLDEST)
	@$(INSTALL_LOCKED) $< --no-deps --target $(OLDEST)
	@touch $@

# build.lock has hatchling, which builds the package and compiles the OTLP decoder.
DECODER := $(wildcard src/batchmill/ingest/decode/*.[ch]) scripts/build_hook.py
$(VENV)/.package-editable: pyproject.toml $(DECODER) | $(VENV)/.build-installed
	@$(FIND_COMPILER) || echo "==> without a C compiler, OTLP is decoded in Python, slower" >&2
	@echo "==> $(VENV): installing batchmill, editable"
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.package-wheel
	@touch $@

$(VENV)/.package-wheel: pyproject.toml README.md LICENSE $(DECODER) $(SOURCES) | $(VENV)/.build-installed
	@$(FIND_COMPILER) || echo "==> without a C compiler, OTLP is decoded in Python, slower" >&2
	@echo "==> $(VENV): installing batchmill, as a wheel"
	@rm -rf build/wheel
	@$(PIP) wheel $(QUIET) --no-deps --no-build-isolation -w build/wheel .
	@$(INSTALL) --no-deps --force-reinstall build/wheel/*.whl
	@rm -f $(VENV)/.package-editable
	@touch $@

# Programs that pip cannot install. A file in .venv has the folder of each; the program is searched again if
# it is gone or, for Java, if JAVA_HOME is set to another folder.
# $(call find,NAME,PROGRAM)
find = [ -s $(VENV)/.$(1)-home ] && [ -x "$$(cat $(VENV)/.$(1)-home)/bin/$(2)" ] || \
	scripts/system-packages.sh $(1) >$(VENV)/.$(1)-home || { rm -f $(VENV)/.$(1)-home; false; }
FIND_JAVA = [ "$${JAVA_HOME:-}" = "$$(cat $(VENV)/.java-home 2>/dev/null)" ] || [ -z "$${JAVA_HOME:-}" ] \
	|| rm -f $(VENV)/.java-home; $(call find,java,java)
FIND_COMPILER = $(call find,compiler,cc)
FIND_POSTGRES = $(call find,postgres,initdb)
FIND_PROMETHEUS = $(call find,prometheus,prometheus)
FIND_ALERTMANAGER = $(call find,alertmanager,prometheus-alertmanager)
FIND_MAVEN = $(call find,maven,mvn)
FIND_CHROMIUM = $(call find,chromium,chromium)
WITH_SYSTEM = JAVA_HOME="$$(cat $(VENV)/.java-home 2>/dev/null)" \
	PATH="$$PATH:$$(cat $(VENV)/.postgres-home 2>/dev/null)/bin:$$(cat $(VENV)/.maven-home 2>/dev/null)/bin:$$(cat $(VENV)/.prometheus-home 2>/dev/null)/bin:$$(cat $(VENV)/.alertmanager-home 2>/dev/null)/bin:$$(cat $(VENV)/.chromium-home 2>/dev/null)/bin"

# The jars of Kafka and Hadoop are in a cache outside of the repository (see tests/kit/jvm.py): Maven is needed once.
TEST_JARS = [ ! -f tests/kit/jvm.py ] || $(BIN)/python -m tests.kit.jvm jars --there || { \
	{ $(FIND_MAVEN); } && echo "==> downloading the jars of Kafka and Hadoop from Maven Central" && \
	$(WITH_SYSTEM) $(BIN)/python -m tests.kit.jvm jars; }

# The Collector is in that cache as well: Go is needed once (see scripts/collector.sh).
COLLECTOR = [ ! -f scripts/collector.sh ] || scripts/collector.sh >/dev/null

# Python compiles the test modules once; otherwise each process of the tests would do it at its start.
COMPILE_TESTS = [ -e $(VENV)/.tests-compiled ] || { $(BIN)/pytest --collect-only -qq >/dev/null 2>&1; \
	touch $(VENV)/.tests-compiled; }

# With a class archive (class data sharing) Spark starts in half the time (see tests/kit/jvm.py).
ARCHIVE := $(VENV)/spark.jsa
SPARK_ARCHIVE = [ ! -s $(VENV)/.java-home ] || [ ! -f tests/kit/jvm.py ] || \
	[ $(ARCHIVE) -nt $(VENV)/.run-installed -a $(ARCHIVE) -nt $(VENV)/.java-home ] || { \
	echo "==> $(VENV): creating a class archive, so that Spark starts faster in the tests"; \
	$(WITH_SYSTEM) $(BIN)/python -m tests.kit.jvm archive $(ARCHIVE) || \
	echo "==> creating the class archive failed; the tests run without it" >&2; }

clean: ## remove .venv and everything that was built or cached
	@rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
