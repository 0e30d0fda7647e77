# make serve [ARGS="--port 9000"]   install, fetch the default model where needed, serve
# make test  [ARGS="tests/server"]  install with the test tools, run pytest
# make test-gpu                     on a machine with a CUDA device: the tests that need one
# make test-browser                 the chat page in a real Chromium
# make check                        format, lint, types, law of imports
# make chart                       lint, render and check the Helm chart; package it into dist/
# make image [ARGS="gpu --build-arg …"]  a container image, by docker, podman or buildah
# make bench [ARGS="--concurrency 8"]  load a running server (http://127.0.0.1:8000)
# make bench-gpu [ARGS="--parts kernels"]  all tests and benchmarks that need a CUDA device
# PYTHON=/path/to/python3 chooses the interpreter that makes .venv.

ARGS ?=
BIN := .venv/bin
export PYTHON

.PHONY: help serve test test-gpu test-browser check chart bench bench-gpu image install install-dev

help:
	@sed -n 's/^# //p' Makefile

install:
	@scripts/install.sh serve

install-dev:
	@scripts/install.sh dev

serve: install
	@exec $(BIN)/plait serve $(ARGS)

test: export PYTHONDONTWRITEBYTECODE = # hundreds of processes start twice as fast with it kept
test: install-dev
	@exec $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

test-gpu: install-dev
	@exec $(BIN)/python -m pytest -c tests/gpu/pytest.ini tests/gpu tests/kernels/gpu $(ARGS)

test-browser: install-dev
	@scripts/browser.sh .venv
	@exec $(BIN)/python -m pytest -c tests/browser/pytest.ini tests/browser $(ARGS)

check: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

chart: install-dev
	@exec $(BIN)/python -m pytest tests/helm $(ARGS)
	@"$$(scripts/helm.sh)" package helm --destination dist

bench: install
	@exec $(BIN)/plait bench $(ARGS)

bench-gpu: install-dev
	@exec $(BIN)/python -m benchmarks.gpu_suite $(ARGS)

image:
	@scripts/image.sh $(or $(ARGS),cpu)
