# Everything runs in a virtual environment of its own, made on first use.
PYTHON ?= python3
BIN = .venv/bin
READY = .venv/ready
PROCESSES ?= 2
PEERS = others nnunet
ADAPTERS = nnunet notebook lightning dask
EXTRAS_others = docs,lightning,notebook
EXTRAS_nnunet = nnunet

.PHONY: setup browser niivue demo test test-bounds test-long test-adapters $(ADAPTERS:%=test-%) peers docs wheel lint bench bench-short clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/segcal demo

# For the tests that open the report; where it cannot be had, they are skipped and say so.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
		(apt-get update -qq && apt-get install -y -qq chromium) >/dev/null 2>&1 || true

# NiiVue for the viewer, as npm has it: version and hash are those of niivue.json; another file is refused.
VENDOR = src/segcal/viewer/vendor
told = $(shell sed -n 's/.*"$(1)": "\(.*\)".*/\1/p' $(VENDOR)/niivue.json)

niivue:
	rm -rf build/niivue && mkdir -p build/niivue
	cd build/niivue && npm pack --silent $(call told,package)@$(call told,version) && tar -xzf *.tgz
	echo "$(call told,sha256)  build/niivue/$(call told,member)" | sha256sum --check --quiet
	cp build/niivue/$(call told,member) $(VENDOR)/$(call told,file)

# Files of tests side by side, each on one thread: threads that share cores wait for one another.
test: setup browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

# Compiled code with a check of every index; code that an earlier run compiled has none, so the cache starts empty.
test-bounds: setup
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$$(mktemp -d) OMP_NUM_THREADS=1 nice $(BIN)/python -m pytest tests/kernels \
		tests/evaluation tests/calibrators tests/quality tests/agreement tests/laws tests/test_losses.py

# What takes long, and has a shorter test in `make test`.
test-long: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "long and not peers" --numprocesses $(PROCESSES) --dist load

# With clusters and frameworks of others, which take their time: files side by side, the longest first. nnU-Net brings a torchvision that others must not find.
test-adapters: peers
	$(MAKE) --no-print-directory --jobs $(PROCESSES) --output-sync $(ADAPTERS:%=test-%)

$(ADAPTERS:%=test-%): test-%: peers
	OMP_NUM_THREADS=1 .peers/$(if $(filter nnunet,$*),nnunet,others)/bin/python -m pytest -m peers tests/adapters/test_$*.py

peers: $(PEERS:%=.peers/%/ready)

.peers/%/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .peers/$*
	.peers/$*/bin/pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS_$*),test,train]"
	[ $* != nnunet ] || .peers/$*/bin/python -c "import torchvision" 2>/dev/null || \
		.peers/$*/bin/pip install --quiet --no-deps torchvision==0.16.2 # built for CUDA; this one imports without
	touch $@

# The site, in build/site; then every block of code in it, but those marked with a reason.
docs: peers
	NO_MKDOCS_2_WARNING=1 .peers/others/bin/mkdocs build --strict
	@grep -rn "not run:" README.md docs --include "*.md"
	OMP_NUM_THREADS=1 .peers/others/bin/python -m pytest -m peers --numprocesses $(PROCESSES) tests/docs
	OMP_NUM_THREADS=1 .peers/nnunet/bin/python -m pytest -m peers tests/docs/test_blocks.py \
		-k "run_in_order and docs/nnunet.md"

# The distribution, tried in environments that have nothing else.
wheel:
	rm -rf dist .peers/build .peers/wheel
	$(PYTHON) -m venv .peers/build
	.peers/build/bin/pip install --quiet build
	.peers/build/bin/python -m build --outdir dist . >/dev/null
	$(PYTHON) -m venv .peers/wheel
	.peers/wheel/bin/pip install --quiet --constraint constraints.txt dist/*.whl
	cd dist && ../.peers/wheel/bin/python ../tests/smoke.py
	.peers/wheel/bin/pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[train]"
	cd dist && ../.peers/wheel/bin/python ../tests/smoke.py train

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

# Each in three processes, on a quiet machine; benchmarks/results has medians, ranges and the machine.
bench: setup
	$(BIN)/python benchmarks/repeat.py losses.py evaluate.py raters.py report.py viewer.py curves.py decisions.py apply.py local.py \
		"calibrate.py --largest 100000000"

# Seconds, on small tensors: fails where a ratio is more than twice what benchmarks/results/short.csv holds.
bench-short: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/short.py

clean:
	rm -rf .venv .peers build dist src/*.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
