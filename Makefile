# make            lists the targets
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The runtimes that make bench-peers compares with; the package does not depend on them.
PEERS := .cache/peers/.venv
PEERS_STAMP := $(PEERS)/.installed
VLLM := .cache/peers/vllm
VLLM_STAMP := $(VLLM)/.installed
# TEST_WORKERS: processes that run tests; 0: one test after the other. Every other one begins with tests that wait for
# brokers, so six keep two cores busy with make test. The stack's tests have processes of their own.
UNIT_WORKERS := $(or $(TEST_WORKERS),6)
STACK_WORKERS := $(or $(TEST_WORKERS),4)
# What an installation compiles; it is installed again where one of them has changed.
KERNELS := hatch_build.py $(shell find relaygr_stream/models/native -name '*.[ch]' -o -name CMakeLists.txt)
# Length of a soak.
MINUTES ?= 30

# Everything that a run writes stays inside the clone.
export TMPDIR := $(CURDIR)/.cache/tmp
$(shell mkdir -p '$(TMPDIR)')
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export MPLCONFIGDIR := $(CURDIR)/.cache/matplotlib
export HYPOTHESIS_STORAGE_DIRECTORY := $(CURDIR)/.cache/hypothesis
export TRITON_CACHE_DIR := $(CURDIR)/.cache/triton
# Tests start processes by the hundred: their modules are compiled once, beside their sources.
unexport PYTHONDONTWRITEBYTECODE
# mkdocs-material prints a notice about its successor at every build unless told not to.
export NO_MKDOCS_2_WARNING := true

.PHONY: help setup demo test test-stack test-repeat test-kafka test-faults test-long test-device mutants trace-hit recoveries check docs docs-serve format lock clean soak fuzz example-dlrmv3 example-movielens demo-checkpoint
.PHONY: bench-cache bench-change bench-delegation bench-dlrmv3 bench-engine bench-features bench-forwarding bench-gateway bench-hand-set bench-handover bench-history bench-lean bench-models bench-paper bench-peers bench-scenarios bench-scheduler bench-simulate bench-slo bench-tables bench-tracing bench-trigger bench-vllm

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv with the relaygr command, and compile the kernels in C

$(STAMP): pyproject.toml relaygr_lab/pyproject.toml constraints.txt docker/setup.lock docker/build.lock $(KERNELS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: Python 3.11 or later is needed; name one with PYTHON=…"; exit 1; }
	@echo 'make: installs into $(VENV), a few minutes: first the tools, then torch and the project'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --require-hashes --requirement docker/setup.lock --requirement docker/build.lock
	@echo 'make: torch, for the devices of this machine (TORCH_INDEX_URL names another index)'
	@grep '^torch==' constraints.txt > $(VENV)/torch.txt
	sh docker/torch.sh $(BIN)/python auto $(VENV)/torch.txt
	@echo 'make: the project'
	$(BIN)/pip install --constraint constraints.txt --no-build-isolation --editable '.[dev]' --editable relaygr_lab  # triton too
	@touch $@

demo: $(STAMP) ## run the whole relay on an embedded broker and show what it does (2 minutes; ARGS="--events FILE --checkpoint FOLDER"; ARGS=--rollout; ARGS=--scenarios)
	$(BIN)/relaygr demo $(ARGS)

test: $(STAMP) ## unit tests, the bus on the embedded broker, one relay of real processes
	$(BIN)/pytest --parallel $(UNIT_WORKERS) $(ARGS)

test-stack: $(STAMP) ## what make test leaves out: the wheel, real processes, on Apache Kafka (KAFKA_HOME, or RELAYGR_TEST_BOOTSTRAP), GPU kernels compiled and interpreted, the longest unit tests, broken workers that the ledger must find, the SLO bench
	$(BIN)/pytest --parallel $(STACK_WORKERS) -m "(kafka or stack) and not long and not faults" $(ARGS)

test-repeat: $(STAMP) ## make test N times beside BUSY busy loops, and what failed (N=20 BUSY=0; Ctrl-C lists what there is)
	$(BIN)/python -m tests.repeat --times $(or $(N),20) --busy $(or $(BUSY),0) -- --hypothesis-profile=search --parallel $(UNIT_WORKERS) $(ARGS)

test-long: $(STAMP) ## all examples of each property, new ones; a million random operations, the books checked after each; kernels under ASan and UBSan (ARGS="--long-operations N --long-seed N")
	$(BIN)/pytest --parallel $(UNIT_WORKERS) -m "hypothesis and not long" --hypothesis-profile=search
	$(BIN)/pytest -m long -s $(ARGS)

fuzz: $(STAMP) ## bad input by the million: codec, intake, trigger, client, status, dead letters (INPUTS=1000000 SEED=1)
	$(BIN)/python -m tests.fuzz.run --inputs $(or $(INPUTS),1000000) --seed $(or $(SEED),1) $(ARGS)

mutants: $(STAMP) ## defects made in modules: which do the unit tests let pass? (ARGS="engine/admission.py --sample 50" or ARGS="--since main --at-least 80")
	$(BIN)/python -m tests.mutants $(ARGS)

trace-hit: $(STAMP) ## how many functions, in how many files, a ranking that hits executes before the model, and how many hand it on (ARGS=--calls lists them)
	@$(BIN)/python -m tests.unit.worker.hit_path $(ARGS)

soak: $(STAMP) ## random faults under load on three brokers of Apache Kafka (MINUTES=30; SEED=N; needs KAFKA_HOME)
	$(BIN)/python -m tests.faults.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

test-kafka: $(STAMP) ## on Apache Kafka (KAFKA_HOME, or RELAYGR_TEST_BOOTSTRAP): the bus suite, then faults on three brokers (20 minutes)
	@[ -n "$$KAFKA_HOME$$RELAYGR_TEST_BOOTSTRAP" ] || echo "make: neither KAFKA_HOME nor RELAYGR_TEST_BOOTSTRAP is set: everything is skipped"
	$(BIN)/pytest -m "kafka and not faults and not long" tests/bus tests/unit tests/e2e
	$(MAKE) test-faults

test-faults: $(STAMP) ## the faults of test-kafka alone: three brokers, real processes, steady load
	$(BIN)/pytest -m faults tests/faults $(ARGS)

recoveries: $(STAMP) ## what the fault tests have measured so far: recovery times, requests served, per fault
	@$(BIN)/python -m tests.faults.measured

test-device: $(STAMP) ## the tests that want a CUDA device or an NPU, on a machine that has one
	$(BIN)/pytest tests/device tests/unit/models $(ARGS)

check: docs $(STAMP) ## ruff, mypy --strict, who may import whom (pyproject.toml, tool.importlinter), the site's links, the contract's files, the pages' length
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python docs/contract.py --check
	$(BIN)/python docs/words.py --check

docs: $(STAMP) ## the documentation as a site, in .cache/site/index.html; a broken link fails
	$(BIN)/mkdocs build --strict  # with --quiet, mkdocs counts no warnings and strict fails on none

docs-serve: $(STAMP) ## the same at http://127.0.0.1:8000, built again at each change (with search, which browsers refuse to files)
	$(BIN)/mkdocs serve

format: $(STAMP) ## let ruff rewrite what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-cache: $(STAMP) ## usable share, cost per operation, eviction against other policies (4 minutes; CHECK=1 judges)
	$(BIN)/python relaygr_lab/benchmarks/cache.py

bench-change: $(STAMP) ## hits after a kill, an absence and a rolling restart, with and without a file, and through a rollout, in place, too; hand-over against a plain socket and blocks; lanes by load (47 minutes; CHECK=1 judges; ARGS=--quick 21)
	$(BIN)/python relaygr_lab/benchmarks/change.py $(ARGS)

bench-delegation: $(STAMP) ## first visits at 80 % load, with and without delegation, and three ways to choose (5 minutes; CHECK=1 judges)
	$(BIN)/python relaygr_lab/benchmarks/delegation.py $(ARGS)

bench-dlrmv3: $(STAMP) ## DLRMv3's traffic and model by MLCommons' LoadGen: the largest VALID rate of each mode (an hour; ARGS=--quick 10 minutes; CHECK=1 judges)
	$(BIN)/relaygr bench dlrmv3 $(ARGS)

bench-engine: $(STAMP) ## the engine against this machine's floors, two threads, a pause (5 minutes; CHECK=1 judges; ARGS="--device cuda")
	$(BIN)/python relaygr_lab/benchmarks/engine.py $(ARGS)

bench-peers: $(STAMP) $(PEERS_STAMP) ## the engine against torch, torch.compile, ONNX Runtime, OpenVINO (10 minutes, ARGS=--quick 3; CHECK=1 judges)
	$(BIN)/python relaygr_lab/benchmarks/peers.py --python $(PEERS)/bin/python $(ARGS)

$(PEERS_STAMP): relaygr_lab/benchmarks/peers_requirements.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --constraint constraints.txt --requirement relaygr_lab/benchmarks/peers_requirements.txt
	@touch $@

bench-vllm: $(STAMP) $(VLLM_STAMP) ## candidates on a cached prefix: vLLM, our model, our worker over its bus (3 minutes; CHECK=1 judges)
	$(BIN)/python relaygr_lab/benchmarks/peers_system.py --python $(VLLM)/bin/python $(ARGS)

# Three packages that vLLM asks for and a GPT-2 does not need come built for another torch, and fail when imported.
$(VLLM_STAMP): relaygr_lab/benchmarks/peers_vllm_requirements.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --requirement relaygr_lab/benchmarks/peers_vllm_requirements.txt
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

bench-models: $(STAMP) ## model families beside each other: bytes, full inference, hits, throughput, length (a minute; ARGS=--quick)
	$(BIN)/python relaygr_lab/benchmarks/models.py $(ARGS)

bench-features: $(STAMP) ## requests with 10, 40 and 120 feature columns: bytes, times to make, decode and embed them (20 seconds; CHECK=1 judges)
	$(BIN)/python relaygr_lab/benchmarks/features.py

bench-tables: $(STAMP) ## an item table in a sparse file of 64 GiB: a worker's start, memory, rows a second beside index_select (1 minute; ARGS="--gib N"; CHECK=1 judges)
	$(BIN)/python relaygr_lab/benchmarks/tables.py $(ARGS)

bench-forwarding: $(STAMP) ## a hot lane and a general overload, with and without forwarding (2 minutes; CHECK=1 judges)
	$(BIN)/python relaygr_lab/benchmarks/forwarding.py $(ARGS)

bench-simulate: $(STAMP) ## relaygr simulate against the real core, and how fast it is (5 minutes; CHECK=1 judges)
	$(BIN)/python relaygr_lab/benchmarks/simulate.py $(ARGS)

bench-scenarios: $(STAMP) ## two scenarios with opposite tides, simulated: a mixed pool, fixed groups, groups that the planner moves, an oracle (half an hour of a core, ARGS=--quick 5 minutes; ARGS=--fleet real processes, 50 minutes; ARGS='--moves 20' in a row, 8; CHECK=1 judges)
	$(BIN)/python relaygr_lab/benchmarks/scenarios.py $(ARGS)

bench-scheduler: $(STAMP) ## delay of rankings behind pre-inference, with and without chunks, at rising load (2 minutes; CHECK=1 judges)
	$(BIN)/python relaygr_lab/benchmarks/scheduler.py $(ARGS)

bench-tracing: $(STAMP) ## what tracing costs a worker's event loop: off, and sampling 0 and 1 (1 minute; CHECK=1 judges)
	$(BIN)/python relaygr_lab/benchmarks/tracing.py $(ARGS)

bench-trigger: $(STAMP) ## predicted against measured costs, a decision's time, events a second, regimes in which its choice could pay (10 minutes; CHECK=1 judges; ARGS=regimes)
	$(BIN)/python relaygr_lab/benchmarks/trigger.py $(ARGS)

bench-gateway: $(STAMP) ## what the gateway adds to a ranking at 100 requests/s, beside RelayClient (1 minute; CHECK=1 judges)
	$(BIN)/python relaygr_lab/benchmarks/gateway.py $(ARGS)

bench-hand-set: $(STAMP) ## what settings by hand are worth beside the defaults, on simulated fleets of each cost file (half an hour; CHECK=1 judges)
	$(BIN)/python relaygr_lab/benchmarks/hand_set.py $(ARGS)

bench-lean: $(STAMP) ## processor time, P99 and largest rate of the relay's own way beside a bare echo over Kafka (6 minutes; CHECK=1 judges; ARGS=--quick)
	$(BIN)/python relaygr_lab/benchmarks/lean.py $(ARGS)

bench-handover: $(STAMP) ## a planned scale-out with and without hand-over: hits, delays, bytes (2 minutes; CHECK=1 judges)
	$(BIN)/python relaygr_lab/benchmarks/handover.py

bench-paper: $(STAMP) ## what each mechanism is worth, on a fleet of emulated devices beside an oracle (2 hours a call, resumable; ARGS=--quick: 10 minutes; CHECK=1 judges)
	$(BIN)/relaygr bench paper $(ARGS)

bench-history: $(STAMP) ## histories by reference: bytes, a trigger's events a second, a ranking's time and hits (3 minutes; CHECK=1 judges)
	$(BIN)/python relaygr_lab/benchmarks/history.py $(ARGS)

bench-slo: $(STAMP) ## how much longer, how much more at the same P99: table, JSON, HTML (3 minutes; CHECK=1 judges)
	$(BIN)/relaygr bench slo $(ARGS)

example-dlrmv3: $(STAMP) ## do longer histories predict ratings better on DLRMv3's traffic: AUC, entropy, NDCG by length (half an hour of a processor; ARGS=--quick)
	$(BIN)/python -m examples.dlrmv3 $(ARGS)

example-movielens: $(STAMP) ## train on DATA=FILE, check, serve, compare: offline and served quality, what length buys (CHECK=1 judges; ARGS=--quick)
	@[ -n "$(DATA)" ] || { echo "make: name the data: make example-movielens DATA=FILE (examples/movielens/README.md)"; exit 1; }
	$(BIN)/python -m examples.movielens --data "$(DATA)" $(ARGS)

demo-checkpoint: $(STAMP) ## train checkpoints/demo, the model of make demo, anew (one thread, half an hour)
	$(BIN)/python -m examples.demo.train $(ARGS)

include docker/testbed.mk

lock: $(STAMP) ## docker/*.lock anew, after a change of dependencies: what images and make setup install, with hashes (torch excepted)
	@$(BIN)/uv pip compile pyproject.toml --extra dev --constraint constraints.txt --universal --python-version 3.11 --quiet --output-file /dev/null  # torch of any index fits
	@for what in requirements setup build uv; do \
	  { echo "# Made by make lock: what is installed by hash ($$what). torch comes by docker/torch.sh."; \
	    $(BIN)/python docker/locked.py $$what | $(BIN)/uv pip compile - --constraint constraints.txt --generate-hashes --universal \
	      --python-version 3.11 --no-header --no-annotate --no-emit-index-url --quiet; } > docker/$$what.lock || exit 1; \
	done

clean: ## remove what make made
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache out build dist relaygr_stream/models/native/*.so
