# `make` prints the targets. Every target that needs the environment makes it first; a second run starts at once.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PY := .venv/bin/python
# Named after this folder's path: in a moved or copied tree dlinfer must be installed again from its new place.
STAMP := .venv/.setup-$(shell pwd | cksum | cut -d' ' -f1)

# Tests run in so many processes: one a core, at most four (each may hold an engine of a few GiB). Waiting threads of
# one process sleep, so that those of the others get the core.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? cores : 4)))
PYTEST := OMP_WAIT_POLICY=passive $(PY) -m pytest --numprocesses $(WORKERS)

# The oldest and the newest torch of pyproject.toml's range.
SEAM_TORCH ?= 2.12.1 2.15.0

# The CPythons of `make test-pythons`.
PYTHONS ?= 3.11 3.12 3.13 3.14

# Read by requirements/setup.sh and requirements/lock.sh, and by examples/demo.py.
export PYTHON TORCH_INDEX MODEL

# The folders whose prose and names the check reads.
PROSE := README.md CONTRIBUTING.md docs/index.md $(addprefix docs/,start guides internals vendors results) dlinfer

.PHONY: help
help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14
	@echo
	@echo "make demo MODEL=/path/to/hf-folder       the demo on a checkpoint of your own"
	@echo "make test PYTEST_ARGS='tests/ops -x'     part of the tests"
	@echo "make test WORKERS=0                      in this process: for a debugger, or to see output at once"
	@echo "make setup PYTHON=python3.12             another interpreter than the one found"
	@echo "make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu"
	@echo "                                         torch's small CPU build instead of PyPI's CUDA build"

$(STAMP): requirements/lock.txt requirements/setup.sh pyproject.toml
	@requirements/setup.sh
	@touch $@

.PHONY: setup
setup: $(STAMP) ## create .venv and install the locked packages and dlinfer

.PHONY: toolchains
toolchains: $(STAMP) ## CPython 3.10 environments with Sophgo's and MegEngine's packages; 4 GB in the user's cache folder
	@$(PY) -m dlinfer toolchain install sophgo megengine

.PHONY: torch-npu
torch-npu: $(STAMP) ## Ascend's torch_npu on stubs of its driver, to read its schemas; 130 MB in the user's cache folder
	@$(PY) -m tests.vendor.ascend.vendor_package.environment

.PHONY: triton
triton: $(STAMP) ## Triton beside the environment, whose interpreter runs the kernels for MetaX cards; 1 GB in the user's cache folder
	@$(PY) -m tests.vendor.maca.simulated_card.triton_package

.PHONY: demo
demo: $(STAMP) ## LMDeploy generates on this CPU; its tokens are compared with HF transformers
	@$(PY) examples/demo.py

.PHONY: doctor
doctor: $(STAMP) ## versions, vendors and the table vendor x op
	@$(PY) -m dlinfer doctor

# Another release of LMDeploy than the installed one, unpacked beside it: LMDEPLOY=0.19.0.
OTHER := $(if $(LMDEPLOY),build/lmdeploy/$(LMDEPLOY))

build/lmdeploy/%: $(STAMP)
	$(PY) -m pip install --quiet --no-deps --target $@ lmdeploy==$*

.PHONY: contract
contract: $(STAMP) $(OTHER) ## does the adaptor fit the installed LMDeploy, and PyPI's LMDEPLOY=0.19.0 where one is named
	@$(PY) -m dlinfer contract --device $(or $(DEVICE),cpu)
	@$(if $(LMDEPLOY),$(PY) -m dlinfer contract --device $(or $(DEVICE),cpu) --source $(OTHER))

.PHONY: test
test: $(STAMP) ## the tests of the gate: one proof of each kind
	$(PYTEST) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

.PHONY: test-full
test-full: $(STAMP) ## all other tests, and the whole matrix, which goes on where it stopped
	$(PYTEST) --dist worksteal -m full $(PYTEST_ARGS)

.PHONY: test-seam
test-seam: ## torch's private parts and the CPU kernels on the oldest and newest torch, or SEAM_TORCH=2.14.1; 5 GB each
	@for torch in $(SEAM_TORCH); do requirements/seam.sh $$torch $(PYTEST_ARGS) || exit; done

.PHONY: test-pythons
test-pythons: ## the tests of the gate on each CPython, or PYTHONS=3.14; 6 GB each in .venv-pythons with PyPI's torch
	@for version in $(PYTHONS); do \
		environment=.venv-pythons/$$version; \
		PYTHON=python$$version ENVIRONMENT=$$environment requirements/setup.sh && \
		PYTHONPATH=. OMP_WAIT_POLICY=passive $$environment/bin/python -m pytest --numprocesses $(WORKERS) \
			--dist loadfile --no-loadscope-reorder $(PYTEST_ARGS) || exit; \
	done

.PHONY: test-arm64
test-arm64: $(STAMP) ## install and test on an emulated ARM64 host, or STAGES='ops models'; as root, 12 GB in .arm64
	@requirements/arm64.sh $(STAGES)

.PHONY: fuzz
fuzz: $(STAMP) ## random programs eagerly and through each engine; SECONDS=60, ENGINE=inductor|openvino|onnxruntime, SEED=
	@OMP_WAIT_POLICY=passive $(PY) -m tests.fuzz --seconds $(or $(SECONDS),60) \
		$(if $(ENGINE),--engine $(ENGINE)) $(if $(SEED),--seed $(SEED))

.PHONY: mutations
mutations: $(STAMP) ## faults put into copies of the tree, each of which tests of `make test` have to catch
	@OMP_WAIT_POLICY=passive $(PY) -m tests.mutations

.PHONY: sanitize
sanitize: $(STAMP) ## C++ kernels and graph mode's loops under address, undefined and thread sanitizers; SANITIZE_ARGS='--isa sse42 avx2'
	$(PY) -m tests.vendor.cpu.sanitized $(SANITIZE_ARGS)

.PHONY: test-isa
test-isa: $(STAMP) ## engines and kernels under each ISA level that can be forced, or modelled; goes on where it stopped
	$(PY) -m tests.isa.run $(ISA_ARGS)

.PHONY: graph-models
graph-models: $(STAMP) ## transformers' architectures in graph mode; goes on where it stopped, writes docs/results/graph_models.md
	$(PY) -m tests.graph.matrix.run_models --write-docs $(GRAPH_ARGS)

.PHONY: models
models: $(STAMP) ## every model family and class of LMDeploy's on the CPU; goes on where it stopped
	$(PY) -m tests.e2e.run_models $(or $(MODEL_ARGS),--write-docs)

.PHONY: device-models
device-models: $(STAMP) ## the families on vendors' simulated devices; goes on where it stopped, writes docs/results/models_on_devices.md
	$(PY) -m tests.e2e.devices.run $(or $(MODEL_ARGS),--write-docs)

.PHONY: conformance
conformance: $(STAMP) ## every op and check of each vendor, on simulated devices too; goes on where it stopped, writes docs/results/conformance.md
	$(PY) -m tests.conformance.run_all --write-docs $(CONFORMANCE_ARGS)

.PHONY: transformers-models
transformers-models: $(STAMP) ## the same architectures optimized, eagerly; writes docs/results/transformers_models.md
	$(PY) -m tests.framework.transformers_ext.run_models --write-docs

.PHONY: graph-ops
graph-ops: $(STAMP) ## torch's op database in graph mode; goes on where it stopped, writes docs/results/graph_ops.md
	$(PY) -m tests.graph.matrix.run_op_db --write-docs $(GRAPH_ARGS)

.PHONY: figures
figures: $(STAMP) ## docs/internals/rooms.svg from the code's imports, and docs/reference from the code
	$(PY) -m docs.generate.rooms
	$(PY) -m docs.generate.reference

.venv/.docs: $(STAMP) requirements/docs.txt
	@$(PY) -m pip --disable-pip-version-check install --quiet --no-deps --requirement requirements/docs.txt
	@touch $@

.PHONY: docs
docs: .venv/.docs ## the site in build/site, to be opened from the disk; fails on a broken link or anchor
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict
	@echo "open build/site/index.html"

.PHONY: bench
bench: $(STAMP) ## LMDeploy on the vendor cpu against its peers; writes docs/results/benchmarks_peers.md
	$(PY) -m benchmarks.peers --write-docs $(BENCH_ARGS)

.PHONY: bench-graph
bench-graph: $(STAMP) ## LMDeploy in graph mode and torch.compile against their eager modes and inductor
	$(PY) -m benchmarks.serving
	$(PY) -m benchmarks.graph_backend

.PHONY: wheel
wheel: $(STAMP) ## dist/*.whl with the CPU kernels compiled for several levels of instructions
	$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	@requirements/manylinux.sh build/wheel/*.whl

.PHONY: lint
lint: $(STAMP) ## ruff (rules and format), plain English, and pyright
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m tests.architecture.prose $(PROSE)
	$(PY) -m pyright

.PHONY: format
format: $(STAMP) ## let ruff format and repair what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

.PHONY: lock
lock: ## resolve the packages anew into requirements/lock.txt
	@requirements/lock.sh

.PHONY: clean
clean: ## remove caches and build products, and what test-full remembers; .venv stays
	@rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	@find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
