# make serve    serve the small voice on port 8000; MODEL=DIR serves another model, FAMILY=NAME a demo checkpoint (noise);
#               REPLICAS=2 serves with two engines
# make test     install what developers need, and run all tests not marked slow or compile; SLOW=2/60 adds the third sixtieth of those
# make test-all run all tests: an hour on two cores
# make lint     check formatting, lint and types
# make docs     build the documentation in site/
# make fixtures regenerate the parity fixtures
# make rehearse lower and build every family for GPUs without a GPU, and count launches; 20 minutes on two cores
# make voice    train the small voice in voice/; takes hours
# Needs Python 3.11 or newer: `make PYTHON=python3.12 serve`.

PYTHON ?= python3
PORT ?= 8000
FAMILY ?=
REPLICAS ?=
SLOW ?= none
MODEL ?= $(if $(FAMILY),demo/$(FAMILY))
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := $(shell grep '^torch==' constraints.txt)
# pip would compile all files of all packages, a third of its time. Python compiles and keeps what it imports.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile) -c constraints.txt

.PHONY: serve test test-all lint docs fixtures rehearse voice

serve: $(VENV)/.serves $(if $(REPLICAS),$(VENV)/.ray) $(MODEL)
	$(BIN)/zoo serve $(MODEL) --port $(PORT) $(if $(REPLICAS),--replicas $(REPLICAS))

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --slow $(SLOW)

test-all:
	$(MAKE) test SLOW=all

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.installed
	$(BIN)/sphinx-build -W --keep-going docs site

rehearse: $(VENV)/.installed
	$(INSTALL) -e '.[dev,rehearse]'
	$(BIN)/python -m pytest -m rehearse -n auto --maxprocesses 4 --dist worksteal

voice: $(VENV)/.installed
	$(BIN)/python -m train_a_voice pack voice
	$(BIN)/python -m train_a_voice train voice/pack voice/trained --minutes 180 --processes 1
	$(BIN)/python -m train_a_voice export voice/trained voice/checkpoint
	$(BIN)/python -m train_a_voice score voice voice/checkpoint

fixtures: $(VENV)/.installed
	tests/parity/remake.sh $(VENV)

demo/%: | $(VENV)/.serves
	$(BIN)/zoo demo-checkpoint $* $@

# Install the pinned torch first; otherwise pip would choose the newest version.
$(VENV)/.serves: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, for example: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	$(INSTALL) -e .
	touch $@

$(VENV)/.ray: $(VENV)/.serves
	$(INSTALL) -e '.[ray]'
	touch $@

$(VENV)/.installed: $(VENV)/.serves
	$(INSTALL) -e '.[dev,browser]'
	touch $@
