.PHONY: help setup demo test lint

help:
	@echo 'make demo   train a small MoE on real text twice, stock and with dropped backward work, and compare'
	@echo 'make test   run the test suite'
	@echo 'make lint   ruff and pyright'
	@echo 'make setup  build .venv only; PYTHON=... chooses the interpreter (3.12 or 3.13)'

setup:
	@PYTHON='$(PYTHON)' bash scripts/setup.sh

demo: setup
	.venv/bin/megatron-lrmoe demo

test: setup
	.venv/bin/python -m pytest

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
