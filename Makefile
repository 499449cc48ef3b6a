# make serve    a speech server on port 8000, with the small voice; MODEL=DIR serves yours, FAMILY=NAME a demo checkpoint, which makes noise
# make test     every test          make lint    ruff and mypy          make fixtures    remake what the parity tests compare with
# make docs     the documentation, in site/
# make voice    trains the small voice anew, in voice/; takes hours
# make rehearse lowers and builds every family for GPUs that are not there, and counts their launches; half an hour on two cores
# Needs Python 3.11 or newer: `make PYTHON=python3.12 serve`.

PYTHON ?= python3
PORT ?= 8000
FAMILY ?=
MODEL ?= $(if $(FAMILY),demo/$(FAMILY))
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: serve test lint docs fixtures rehearse voice

serve: $(VENV)/.installed $(MODEL)
	$(BIN)/zoo serve $(MODEL) --port $(PORT)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.installed
	$(BIN)/sphinx-build -W --keep-going docs site

rehearse: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,rehearse]'
	$(BIN)/python -m pytest -m rehearse -n auto --maxprocesses 4 --dist loadgroup

voice: $(VENV)/.installed
	$(BIN)/python -m examples.train_a_voice all voice

fixtures: $(VENV)/.installed
	tests/parity/remake.sh $(VENV)

demo/%: | $(VENV)/.installed
	$(BIN)/zoo demo-checkpoint $* $@

# torch first and pinned: left to itself, pip would take the newest there is.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, for example: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,browser]'
	touch $@
