# Every target makes .venv on first use and reuses it after; see .ci/setup-env.
#   make demo     the shipped model answers its prompts, with its experts paged
#   make test     all tests          make test PYTEST_ARGS="tests/unit -k pages"
#   make test-slow                    the tests over Ray; skipped without it: .venv/bin/pip install 'ray[data]'
#   make native-test                  csrc's own tests, with sanitizers
#   make lint     formatters and types, as the gate runs them
#   make format   lets the formatters rewrite what they can
#   make bench    a reduced set of benchmarks; figures in build/bench/summary.json, pictures beside it
#   make PYTHON=python3.12 ...       builds .venv from another interpreter
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
CPP_SOURCES = $(shell find csrc -name '*.h' -o -name '*.cpp')

DEMO_ARGS ?=
# A device that holds a quarter of the experts, behind a link slow enough to see.
DEMO = $(BIN)/vllm-moe-lightning run --model examples/tiny-shakespeare-moe --prompts examples/prompts.txt \
	--device-memory-mib 6 --page-mib 0.25 --h2d-gb-per-s 0.5 --temperature 0.7 \
	--report build/demo/report.json $(DEMO_ARGS)

# Nothing here needs a hub or reports home.
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow native-test lint format bench clean

help:
	@sed -n '2,9s/^# *//p' Makefile

setup:
	@PYTHON='$(PYTHON)' VENV='$(VENV)' bash .ci/setup-env

demo: setup
	@mkdir -p build/demo
	@VLLM_LOGGING_LEVEL=$${VLLM_LOGGING_LEVEL:-ERROR} $(DEMO)

test: setup
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: setup
	@$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

native-test: setup
	@PATH="$(abspath $(BIN)):$$PATH" bash .ci/native-test

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_SOURCES)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_SOURCES)

# About seven minutes on two idle cores. Each can be run alone; what there are no results of is taken from
# benchmarks/results. Of others' engines those run that are installed (benchmarks/README.md).
BENCH = build/bench
bench: setup
	@mkdir -p $(BENCH)
	@$(BIN)/python benchmarks/pipeline.py --json $(BENCH)/pipeline.json
	@$(BIN)/python benchmarks/predicted_vs_measured.py --json $(BENCH)/predicted_vs_measured.json
	@$(BIN)/python benchmarks/cpu_attention.py --quick --json $(BENCH)/cpu_attention.json
	@$(BIN)/python benchmarks/throughput.py --quick --json $(BENCH)/throughput.json
	@$(BIN)/python benchmarks/host_memory_sweep.py --quick --json $(BENCH)/host_memory_sweep.json
	@$(BIN)/python benchmarks/baselines.py --quick --json $(BENCH)/baselines.json
	@$(BIN)/python benchmarks/pictures.py --results $(BENCH)
	@$(BIN)/python benchmarks/figures.py --results $(BENCH) --json $(BENCH)/summary.json

clean:
	rm -rf $(VENV) build dist
