# make demo | make test: each does all the set-up it needs.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
RANKS ?= 2
FUZZ_SECONDS ?= 600
SOAK_SECONDS ?= 1800
SEEDS ?= 1000
TEST_PATH = .:tests/support:tests:tests/comm
# What `make test` and `make test-all` run: T files or folders (all tests unless given), K an expression of pytest's -k. For example
# `make test T=tests/comm/test_moves.py K=every_bit`, or `make test-all T=tests/codec`.
T ?=
K ?=
# Three workers for all tests on two cores, as some tests wait for a network or for each other; none for a selection. The tests of a file share
# fixtures, and so a worker. xdist would give files with few tests out last, and those are the longest: tests/support/tiers.py has the order.
WORKERS = $(if $(T)$(K),,-n 3 --dist loadfile --no-loadscope-reorder)
PYTEST = $(BIN)/python -m pytest -q --need-deepspeed --durations=25 $(WORKERS) $(T) $(if $(K),-k "$(K)")
# Tests start thousands of processes; each would compile the modules anew.
unexport PYTHONDONTWRITEBYTECODE
export DS_ACCELERATOR = cpu
export PYTHONWARNINGS = ignore::FutureWarning

.PHONY: demo test test-all every-test corpus step-logs doctor-check fuzz fuzz-config soak soak-sim soak-programs traces gpu gpu-wheels cpu-instructions wheels matrix results dockerfile mutants size lint clean

# torch first and pinned: with it in place nothing else pulls another build. DS_BUILD_OPS=0: DeepSpeed compiles nothing at install.
# --no-compile: an import compiles the few modules that it needs, of fourteen thousand.
$(VENV)/ready: setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or later is needed, $(PYTHON) is %d.%d; use make PYTHON=..." % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile torch==2.13.0 numpy setuptools wheel
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --no-compile -e '.[test]'
	touch $@

demo: $(VENV)/ready
	$(BIN)/python examples/train_gpt.py --compare --ranks $(RANKS) --ds-config examples/ds_config_zero3.json

# The short tier: six minutes on two cores where the builds of the last run are kept, more where there are none. Left to `test-all`:
# tests marked `full`, and combinations of parameters for kernel routes and instruction sets (tests/support/tiers.py).
test: $(VENV)/ready lint
	$(PYTEST) -m "not full"

# Everything, with types checked meanwhile, which takes two minutes the first time. Then a minute of fuzzing and a minute of random
# operations, at a time, each from a new seed, which it prints.
test-all: $(VENV)/ready
	$(MAKE) --jobs=2 lint size every-test
ifeq ($(T)$(K),)
	$(MAKE) --jobs=2 fuzz soak FUZZ_SECONDS=60 SOAK_SECONDS=60
endif

every-test: $(VENV)/ready
	env -u MAKEFLAGS $(PYTEST)  # for tests that call make

# Tensors of a real training step, for `bench codec --corpus`; about half a minute.
corpus: $(VENV)/ready
	$(BIN)/python examples/make_corpus.py --out out/corpus.safetensors

# Logs of three trainings, for `steps`: a decaying learning rate, that of fine-tuning, and ZeRO-3 with a base. Some minutes.
LOGGED = DS_ZIPCCL='{"enabled": true, "mode": "always", "zero3_base": "host", "step_log": "out/steps/$(1).jsonl"}' \
    $(BIN)/python examples/train_gpt.py --steps 200 --ds-config examples/ds_config_$(firstword $(subst _, ,$(1))).json
step-logs: $(VENV)/ready
	rm -rf out/steps && mkdir -p out/steps
	$(call LOGGED,zero2_cosine) --lr 3e-4 --schedule cosine
	$(call LOGGED,zero2_finetune) --lr 2e-5
	$(call LOGGED,zero3_cosine) --lr 3e-4 --schedule cosine

# As root, on a quiet machine: predictions of `doctor` beside trainings of three ZeRO stages over three links; fails beyond 20%.
doctor-check: $(VENV)/ready
	$(BIN)/python -m ds_zipccl bench doctor --link 100mbit 300mbit 1gbit --json docs/results/doctor.json

# Ten minutes of damaged frames under AddressSanitizer and UBSan, from a new seed; `make test-all` fuzzes for one minute.
fuzz: $(VENV)/ready
	PYTHONPATH=$(TEST_PATH) $(BIN)/python tests/fuzz/asan.py $(FUZZ_SECONDS)

# Random configurations of DeepSpeed and this package, seeds 0 to CONFIGS - 1, each trained plain and coded; eight minutes on two cores.
CONFIGS ?= 300
fuzz-config: $(VENV)/ready
	PYTHONPATH=$(TEST_PATH):tests/fuzz $(BIN)/python tests/fuzz/configurations.py $(CONFIGS)

# Half an hour of random operations on four ranks, each compared with the plain collective; `make test-all` has one minute of them.
soak: $(VENV)/ready
	PYTHONPATH=$(TEST_PATH) $(BIN)/python tests/soak.py $(SOAK_SECONDS)

# Random programs on a simulated GPU with a simulated NCCL, for seeds 0 to SEEDS - 1 on 2, 3, 4 and 8 ranks each; half an hour on two cores.
soak-sim: $(VENV)/ready
	PYTHONPATH=$(TEST_PATH) $(BIN)/python tests/on_sim/soak.py $(SEEDS)

# Random programs of FSDP2 and of ZeRO-3 engines, plain and coded, for seeds 0 to SEEDS - 1; about a second each.
soak-programs: $(VENV)/ready
	PYTHONPATH=$(TEST_PATH) $(BIN)/python tests/support/fsdp_programs.py 0 --seeds $(SEEDS)
	PYTHONPATH=$(TEST_PATH) $(BIN)/python tests/support/zero_programs.py 0 --seeds $(SEEDS)

# Every message and result of fixed calls and trainings, beside those of tests/support/traces.gz: each difference has a line, another result
# is an error. After a change of messages on purpose, copy out/traces.gz there. Some minutes.
traces: $(VENV)/ready
	PYTHONPATH=$(TEST_PATH):tests/fuzz $(BIN)/python tests/traces.py record out/traces.gz
	PYTHONPATH=$(TEST_PATH):tests/fuzz $(BIN)/python tests/traces.py compare tests/support/traces.gz out/traces.gz

# On a machine with a GPU, in the environment of $(PYTHON), which has torch with CUDA and numpy; pytest, DeepSpeed and a compiled driver come
# from there, or from the folder WHEELS. Three parts of at most eight minutes, with PART=1, 2 or 3 one of them: 1 measures what estimates are
# made of, and decides most; 2 shows that bits are right; 3 compares plain and coded steps over a shaped link, and measures the kernels. The
# results go to the folder OUT, after every step; those of other parts stay there. The first lines name the parts of the machine that are
# missing, the last one says how it went: status 1 after wrong bits, a hang or an error, 3 if a step was only slow or late.
OUT ?= docs/results
WHEELS ?= out/wheels
PART ?=
gpu:
	env -u DS_ACCELERATOR PYTHONPATH=$(TEST_PATH) $(PYTHON) tests/gpu/gpu.py $(if $(PART),--part $(PART) )--out "$(OUT)" --wheels "$(WHEELS)"

# On a machine with a network: DeepSpeed, pytest and all that they need beside torch, for Python GPU_PYTHON of the machine with the GPU; where
# there is nvcc, some minutes of it, the driver for every GPU too.
GPU_PYTHON ?= 3.12
gpu-wheels: $(VENV)/ready
	PYTHONPATH=$(TEST_PATH):tests/codec:tests/fuzz:tests/gpu $(BIN)/python tests/gpu/wheels.py make "$(WHEELS)" --python $(GPU_PYTHON)

# Instructions an element of the C++ kernels, on x86-64 and on 64-bit Arm: needs qemu-user-static and g++-aarch64-linux-gnu. Some minutes.
cpu-instructions: $(VENV)/ready
	PYTHONPATH=$(TEST_PATH) $(BIN)/python tests/support/instructions.py

# The sdist and a wheel for each CPU, with the C++ library inside, in dist/; zig, a compiler for both CPUs, comes as a wheel. Four minutes.
wheels: $(VENV)/ready
	$(BIN)/python -m pip install -q build wheel ziglang auditwheel twine
	$(BIN)/python release/wheels.py

# The core set of tests with many versions of Python, torch, DeepSpeed and numpy: an environment each. An hour on two cores with a network, and
# 30 GB of disk; rows that the sources have measured already are kept. The results go to docs/results/matrix.json after every row.
matrix: $(VENV)/ready
	$(BIN)/python -m pip install -q uv
	$(BIN)/python release/matrix.py

# Every file of docs/results, measured again by the command that it has, where the sources have changed since; as root, on a quiet machine.
# Hours, and it goes on where it was stopped. ONLY names files, as in ONLY="sync rows". `python release/results.py --list` says what is older.
ONLY ?=
results: $(VENV)/ready
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q uv -e '.[bench]'
	$(BIN)/python release/results.py $(ONLY)
	$(BIN)/python docs/generate.py

# The lines of the Dockerfile, in an empty folder and environment, without Docker. Minutes, and a network.
dockerfile:
	$(PYTHON) release/dockerfile.py

# Random mutations of the package, each against the tests of its own subject; survivors lack a test or have a reason. The clone that it
# mutates and its results stay in out/mutants, and the same SEED goes on where it ended.
SEED ?= 28
mutants: $(VENV)/ready
	$(BIN)/python -m pip install -q 'cosmic-ray>=8.7,<9'
	PYTHONPATH=$(TEST_PATH) $(BIN)/python tests/mutants.py --seed $(SEED)

# Lines of each folder beside its limit, which the tests enforce, and the change against main.
size: $(VENV)/ready
	@$(BIN)/python tests/size.py

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy ds_zipccl

# The packages of the documentation, which no test needs.
$(VENV)/docs: $(VENV)/ready
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q -e '.[docs]'
	touch $@

# The folder docs must not stand for the target.
.PHONY: docs

# Regenerates the tables of README.md and docs/, and builds the site in out/site; a broken link is an error.
docs: $(VENV)/docs
	$(BIN)/python docs/generate.py
	$(BIN)/python -m mkdocs build --strict --site-dir out/site

clean:
	rm -rf $(VENV) build dist *.egg-info out
