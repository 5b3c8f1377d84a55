# Everything a developer types. `make help` lists it; a bare Debian 12 is enough to start.

PYTHON := .venv/bin/python
# More arguments for pytest: make test ARGS="-k roundtrip"
ARGS ?=
# One more than there are processors: one of them runs the tests with CRIU, which mostly wait.
WORKERS ?= $(shell expr $$(nproc) + 1)
# Markers whose tests must run: a skipped one fails. Comma-separated; .ci/run sets it.
SNAPSTORE_REQUIRE ?=

.DEFAULT_GOAL := help
.PHONY: help demo demo-s3 test lint style types layers bench clean setup criu servers

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: setup criu  ## snapshot a living process, delete it, bring it back (needs root or sudo)
	@$(PYTHON) -m tools.demo

demo-s3: setup criu  ## the same with the store in a bucket of a local S3 server
	@$(PYTHON) -m tools.demo --s3

test: setup criu servers lint  ## everything that has to pass before a commit
	@$(PYTHON) -m pytest --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder \
		$(if $(SNAPSTORE_REQUIRE),--require $(SNAPSTORE_REQUIRE)) $(ARGS)

lint: setup  ## style, types, layers
	@$(MAKE) --no-print-directory --jobs 3 --keep-going --output-sync style types layers

style:
	@$(PYTHON) -m ruff check --quiet --output-format concise .
	@$(PYTHON) -m ruff format --check --quiet .
	@if [ -e tools/tidy.py ]; then $(PYTHON) -m tools.tidy; fi

types:
	@$(PYTHON) -m mypy --no-error-summary

layers:
	@report=$$(.venv/bin/lint-imports --no-logo 2>&1) || { echo "$$report"; exit 1; }

bench: setup  ## measure speed and size beside restic, borg, casync and hf-xet (half an hour)
	@tools/bench/install_peers.sh
	@$(PYTHON) -m tools.bench.local $(ARGS)

clean:  ## remove what make has made: .venv, CRIU, caches
	rm -rf .venv tools/criu build dist *.egg-info .cache .hypothesis
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup:
	@tools/setup.sh

# One after the other also under `make -j`: two apt-get at once would lock each other out.
criu: setup
	@tools/install_criu.sh

servers: criu
	@tools/install_servers.sh
