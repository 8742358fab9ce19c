# A target installs what it needs, and nothing else, into .venv; that takes no time when nothing it depends on has changed.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := pyproject.toml CMakeLists.txt tools/environment.py $(wildcard csrc/*) $(if $(GRADWIRE_LOCK),constraints.txt)

# Those that need Ray, Spark, Lightning, Accelerate and Transformers.
ENGINES := tests/engines

.PHONY: train test test-full test-all test-user test-elsewhere test-versions test-browser test-javascript test-clusters test-hard test-triton lint bench \
	docs dist golden sanitize mutants setup clean
.NOTPARALLEL:  # two targets would install into one environment at once

# .venv/.train is there once all that `make train` needs is: tools/environment.py has the list of steps.
.venv/.%: $(SOURCES)
	$(PYTHON) tools/environment.py $*

.venv-clusters/.clusters .venv-triton/.triton: $(SOURCES)
	$(PYTHON) tools/environment.py $(subst .,,$(suffix $@))

train: .venv/.train  ## the main job: two workers train the digits CNN with compressed gradients
	$(BIN)/gradwire train $(ARGS)

test: .venv/.test  ## the tests that matter while one works
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not full" --durations=25 --ignore=$(ENGINES) $(ARGS)

test-full: .venv/.full  ## the tests that `make test` leaves out
	$(BIN)/python -m pytest -n 2 --dist loadfile -m full --durations=25 --ignore=$(ENGINES) $(ARGS)

test-all: test test-full test-browser test-javascript test-clusters test-hard test-user  ## every test there is

test-user:  ## make train and make test as a user without rights would: a fresh clone, an empty home, a path with a space
	$(PYTHON) tools/as_user.py $(ARGS)

test-elsewhere: .venv/.test  ## make test on a busy machine without IPv6 and a home, with /proc/sys read-only; as root
	bash tools/elsewhere.sh $(MAKE) test ARGS="$(ARGS)"

setup: .venv/.dev  ## all that any target needs in .venv

lint: .venv/.lint  ## style, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.bench  ## sizes of every codec, and speed beside the peers: minutes; ARGS="--quick" for seconds
	$(BIN)/gradwire bench codecs --bytes
	$(BIN)/gradwire bench codecs $(ARGS)

sanitize: .venv/.test  ## MINUTES=10 of random cases against the reference, under AddressSanitizer and UBSan
	$(BIN)/python -m pip install --quiet --disable-pip-version-check cmake nanobind
	$(BIN)/cmake -S . -B build/sanitize -DCMAKE_BUILD_TYPE=Debug -DGRADWIRE_SANITIZE=ON \
		-DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)"
	$(BIN)/cmake --build build/sanitize --parallel 2
	LD_PRELOAD=$$($(CXX) -print-file-name=libasan.so):$$($(CXX) -print-file-name=libubsan.so) \
		ASAN_OPTIONS=detect_leaks=0 \
		$(BIN)/python -m tests.kernels.sanitize build/sanitize --minutes $(or $(MINUTES),10)

test-triton: .venv-triton/.triton  ## the CUDA kernels on the CPU, under Triton's interpreter; an environment of its own, of a gigabyte
	TRITON_INTERPRET=1 .venv-triton/bin/python -m pytest -n auto tests/kernels/test_triton.py

# Ray looks for public addresses, and binds to what it finds: it gets a network that has loopback and nothing else.
ALONE := unshare --net $(shell test "$$(id -u)" = 0 || echo --map-root-user) bash -c 'ip link set lo up; exec "$$@"' _

test-clusters: .venv-clusters/.clusters  ## torchrun, Ray, Spark, Lightning, Accelerate, Transformers, FSDP2; an environment of its own, of 3 GB
	.venv-clusters/bin/python -m pytest -q $(ENGINES)/test_torchrun.py $(ENGINES)/test_fsdp2.py $(ARGS)
	GRADWIRE_TEST_RAY=1 $(ALONE) .venv-clusters/bin/python -m pytest -q $(ENGINES) --ignore=$(ENGINES)/test_torchrun.py \
		--ignore=$(ENGINES)/test_fsdp2.py tests/sharding/test_ray.py src/gradwire/adapters $(ARGS)

test-versions:  ## the first tier with the oldest torch, the newest and the pinned one; environments of their own, of 5 GB each
	$(PYTHON) tools/versions.py $(ARGS)

test-browser: .venv/.full  ## the dashboard in a real browser; installs Chromium if there is none and we may
	@command -v chromium >/dev/null || if test "$$(id -u)" = 0; then \
		apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; \
	else echo "there is no chromium: sudo apt-get install chromium"; exit 1; fi
	GRADWIRE_TEST_BROWSER=1 $(BIN)/python -m pytest tests/dashboard/test_browser.py $(ARGS)

test-javascript: .venv/.test  ## the worker in JavaScript against a real server; needs node and npm, and is skipped without
	! command -v npm >/dev/null || npm install --prefix examples/javascript --silent --no-package-lock --no-audit --no-fund \
		--ignore-scripts
	GRADWIRE_TEST_JAVASCRIPT=1 $(BIN)/python -m pytest -rs tests/coordinator/test_javascript.py $(ARGS)

# The tests of test-full whose load has a size, at the size that the documentation speaks of.
HARD := tests/coordinator/test_crash.py tests/coordinator/test_journal.py tests/coordinator/test_store.py \
	tests/coordinator/test_strangers.py tests/coordinator/test_attacks.py tests/test_checkpoint.py tests/dashboard/test_memory.py
SIZED := no_acknowledged_push or torn_end_is_found or restart_takes or silent_connections or never_comes or just_short \
	or not_taken or garbage or foreign or hostile

test-hard: .venv/.test  ## the coordinator: 200 times kill -9, 1 GB of journal, 1,100 strangers, 100,000 hostile payloads; minutes
	GRADWIRE_KILLS=200 GRADWIRE_JOURNAL_MB=1000 GRADWIRE_STRANGERS=1100 GRADWIRE_FUZZ=100000 GRADWIRE_FOREIGN_STATES=400 \
		GRADWIRE_HOSTILE=1 $(BIN)/python -m pytest -n 2 --dist loadfile -rP --timeout 900 --durations=15 $(HARD) -k "$(SIZED)"

docs: .venv/.docs  ## the site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: .venv/.full  ## wheel and source release into dist/, each installed into an empty environment and tried there; minutes
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m tests.release.check

golden: .venv/.train  ## freeze the bytes of codecs that have no golden file yet; old ones are never rewritten
	$(BIN)/python -m tests.golden.freeze

mutants: .venv/.test  ## 40 mutations of src/, and which of them the tests of make test find; an hour
	$(BIN)/python -m tests.mutants $(ARGS)

clean:
	rm -rf .venv .venv-triton .venv-clusters .venv-torch-* build dist site
