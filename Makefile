# Every target does its own set-up into .venv; it takes a second when nothing it depends on has changed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)

.PHONY: train test lint bench docs golden setup clean

setup: $(READY)

$(READY): $(SOURCES)
	@echo "setting up .venv: a minute or two, once"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[dev]'
	touch $@

train: $(READY)  ## the main job: two workers train the digits CNN with compressed gradients
	$(BIN)/gradwire train $(ARGS)

test: $(READY)  ## the whole test suite
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

lint: $(READY)  ## style, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)  ## sizes and speed of every codec
	$(BIN)/gradwire bench codecs --bytes $(ARGS)
	$(BIN)/gradwire bench codecs $(ARGS)

docs: $(READY)  ## the site, into site/
	$(BIN)/mkdocs build --strict

golden: $(READY)  ## freeze the bytes of codecs that have no golden file yet; old ones are never rewritten
	$(BIN)/python -m tests.golden.freeze

clean:
	rm -rf .venv build dist site
