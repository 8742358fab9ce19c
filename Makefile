# Every target does its own set-up into .venv; it takes a second when nothing it depends on has changed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)

# Files that share groups of ranks among their tests.
GROUPS := tests/adapters tests/optim
# Those that need Ray, Spark, Lightning, Accelerate and Transformers.
ENGINES := tests/engines

.PHONY: train test test-versions test-browser test-javascript test-clusters test-hard test-triton lint bench docs dist golden sanitize setup clean

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
	$(BIN)/python -m pytest -n auto --dist worksteal $(addprefix --ignore=,$(GROUPS) $(ENGINES)) $(ARGS)
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

# Ray looks for public addresses, and binds to what it finds: it gets a network that has loopback and nothing else.
ALONE := unshare --net $(shell test "$$(id -u)" = 0 || echo --map-root-user) bash -c 'ip link set lo up; exec "$$@"' _

test-clusters:  ## torchrun, Ray, Spark, Lightning, Accelerate, Transformers, FSDP2; an environment of its own, of 3 GB
	test -x .venv-clusters/bin/python || $(PYTHON) -m venv .venv-clusters
	.venv-clusters/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--editable '.[dev,ray,spark,lightning,accelerate]'
	.venv-clusters/bin/python -m pytest -q $(ENGINES)/test_torchrun.py $(ENGINES)/test_fsdp2.py $(ARGS)
	GRADWIRE_TEST_RAY=1 $(ALONE) .venv-clusters/bin/python -m pytest -q $(ENGINES) --ignore=$(ENGINES)/test_torchrun.py \
		--ignore=$(ENGINES)/test_fsdp2.py tests/sharding/test_ray.py src/gradwire/adapters $(ARGS)

test-versions:  ## the first tier with the oldest torch, the newest and the pinned one; environments of their own, of 5 GB each
	$(PYTHON) tools/versions.py $(ARGS)

test-browser: $(READY)  ## the dashboard in a real browser; installs Chromium if there is none and we may
	@command -v chromium >/dev/null || if test "$$(id -u)" = 0; then \
		apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; \
	else echo "there is no chromium: sudo apt-get install chromium"; exit 1; fi
	GRADWIRE_TEST_BROWSER=1 $(BIN)/python -m pytest tests/dashboard/test_browser.py $(ARGS)

test-javascript: $(READY)  ## the worker in JavaScript against a real server; needs node and npm, and is skipped without
	! command -v npm >/dev/null || npm install --prefix examples/javascript --silent --no-package-lock --no-audit --no-fund \
		--ignore-scripts
	GRADWIRE_TEST_JAVASCRIPT=1 $(BIN)/python -m pytest -rs tests/coordinator/test_javascript.py $(ARGS)

test-hard: $(READY)  ## the coordinator: 200 times kill -9, 1 GB of journal, 1,100 strangers, 100,000 hostile payloads; minutes
	GRADWIRE_KILLS=200 $(BIN)/python -m pytest -s tests/coordinator/test_crash.py
	GRADWIRE_JOURNAL_MB=1000 $(BIN)/python -m pytest -s tests/coordinator/test_journal.py tests/coordinator/test_store.py
	GRADWIRE_STRANGERS=1100 $(BIN)/python -m pytest -s --timeout 900 tests/coordinator/test_strangers.py
	GRADWIRE_FUZZ=100000 $(BIN)/python -m pytest -s --timeout 900 tests/coordinator/test_attacks.py
	GRADWIRE_FOREIGN_STATES=400 $(BIN)/python -m pytest -s tests/test_checkpoint.py
	GRADWIRE_HOSTILE=1 $(BIN)/python -m pytest -s tests/dashboard/test_memory.py

docs: $(READY)  ## the site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(READY)  ## wheel and source release into dist/, each installed into an empty environment and tried there; minutes
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m tests.release.check

golden: $(READY)  ## freeze the bytes of codecs that have no golden file yet; old ones are never rewritten
	$(BIN)/python -m tests.golden.freeze

clean:
	rm -rf .venv .venv-triton .venv-clusters .venv-torch-* build dist site
