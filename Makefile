# Every target does its own set-up into .venv; it takes a second when nothing it depends on has changed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)

# Files that share groups of ranks among their tests.
GROUPS := tests/adapters tests/optim

.PHONY: train test test-hard test-triton test-ray lint bench docs golden sanitize setup clean

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
	$(BIN)/python -m pytest -n auto --dist worksteal $(addprefix --ignore=,$(GROUPS)) $(ARGS)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(GROUPS) $(ARGS)

lint: $(READY)  ## style, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)  ## sizes of every codec, and speed beside the peers: minutes; ARGS="--quick" for seconds
	$(BIN)/gradwire bench codecs --bytes
	$(BIN)/gradwire bench codecs $(ARGS)

sanitize: $(READY)  ## MINUTES=10 of random cases against the reference, under AddressSanitizer and UBSan
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt cmake nanobind
	$(BIN)/cmake -S . -B build/sanitize -DCMAKE_BUILD_TYPE=Debug -DGRADWIRE_SANITIZE=ON \
		-DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir)
	$(BIN)/cmake --build build/sanitize --parallel 2
	LD_PRELOAD=$$($(CXX) -print-file-name=libasan.so):$$($(CXX) -print-file-name=libubsan.so) \
		ASAN_OPTIONS=detect_leaks=0 \
		$(BIN)/python -m tests.kernels.sanitize build/sanitize --minutes $(or $(MINUTES),10)

test-triton:  ## the CUDA kernels on the CPU, under Triton's interpreter; an environment of its own, of a gigabyte
	test -x .venv-triton/bin/python || $(PYTHON) -m venv .venv-triton
	.venv-triton/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[dev]' 'triton==3.6.0'
	TRITON_INTERPRET=1 .venv-triton/bin/python -m pytest -n auto tests/kernels/test_triton.py

test-ray:  ## the exchange by Ray's object store; an environment of its own, and a network: Ray looks for public addresses
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[dev]' 'ray>=2.40'
	GRADWIRE_TEST_RAY=1 unshare --map-root-user --net bash -c 'ip link set lo up; exec "$$@"' _ \
		.venv-ray/bin/python -m pytest -p no:xdist tests/sharding/test_ray.py

test-hard: $(READY)  ## the coordinator's service: 200 times kill -9 under load, 100,000 hostile payloads; minutes
	GRADWIRE_KILLS=200 $(BIN)/python -m pytest -s tests/coordinator/test_crash.py
	GRADWIRE_FUZZ=100000 $(BIN)/python -m pytest -s --timeout 900 tests/coordinator/test_attacks.py

docs: $(READY)  ## the site, into site/
	$(BIN)/mkdocs build --strict

golden: $(READY)  ## freeze the bytes of codecs that have no golden file yet; old ones are never rewritten
	$(BIN)/python -m tests.golden.freeze

clean:
	rm -rf .venv .venv-triton .venv-ray build dist site
