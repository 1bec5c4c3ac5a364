# Every target makes the environment it needs; nothing but git, make and python3 has to be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.8
# One more than cores: some tests wait for a process or a limit of time.
WORKERS ?= 3
# Each worker starts with tests that stand side by side, which share fixtures and compiled operations.
PYTEST = -m pytest -n $(WORKERS) --dist worksteal
# Left out by default: tests that repeat a statement in more settings (the marks of pyproject.toml).
MARKS ?= not thorough and not more
ARGS ?=
# Training uses the accelerator of this machine, with the extra that brings JAX for it: cpu, cuda12, cuda13 or tpu.
ACCELERATOR ?= $(shell $(BIN)/python -c "from train.config.accelerator import find_accelerator; print(find_accelerator())")
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
# Tests of a source that did not change find their programs compiled.
export KLJAX_TEST_PROGRAMS ?= $(abspath $(VENV))/programs

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

# Plans of the compilers of TPUs and GPUs, and the built wheel: in environments of their own, by targets of the second file.
AOT := $(addprefix tests/,benchmarks/test_head_aot_plans.py benchmarks/test_attention_plans.py train/models/test_grouped_plans.py \
  train/models/test_expert_axis_plans.py train/rollouts/test_engine_plans.py train/rollouts/test_layout_plans.py \
  train/plan/test_adapter_plans.py train/plan/test_plans_aot.py train/plan/test_remat_aot.py train/process/test_xla_flags_aot.py)
ELSEWHERE := $(AOT) tests/integration/test_wheel.py tests/launch/test_slurm.py tests/storage tests/reasoning_gym tests/renderers tests/agents

.PHONY: help train real real-agent test test-all check lint format types docs

# The first target, so that `make` alone prints it. The awk of macOS and mawk know no more than this.
help: ## this list
	@for file in Makefile .ci/more.mk; do \
	  awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "%-18s %s\n", $$1, $$2 }' $$file; test $$file != Makefile || echo; done

$(VENV)/.ready: pyproject.toml uv.lock
	$(call make-environment,$(PYTHON),$(VENV),PYTHON,$(PYTHONS))

# JAX for the accelerator, beside what the tests need.
$(VENV)/.ready-cuda12 $(VENV)/.ready-cuda13 $(VENV)/.ready-tpu: $(VENV)/.ready-%: $(VENV)/.ready
	UV_PROJECT_ENVIRONMENT=$(VENV) $(BIN)/uv sync --frozen --inexact --quiet --python $(BIN)/python --extra train --extra $*
	touch $@

$(VENV)/.ready-cpu: $(VENV)/.ready
	touch $@

# The accelerator is looked for when a recipe runs: other targets need none.
train: $(VENV)/.ready ## the main job on the accelerator that is there: warm start, RL, before and after
	@$(MAKE) --silent $(VENV)/.ready-$(ACCELERATOR)
	$(ON_DEVICE)$(BIN)/python -m train configs/quickstart.yaml $(ARGS)

real: $(VENV)/.ready ## a pretrained model of 135M weights learns word problems: fetch, import, train, compare
	@$(MAKE) --silent $(VENV)/.ready-$(ACCELERATOR)
	$(ON_DEVICE)$(BIN)/python -m train.real $(ARGS)

real-agent: $(VENV)/.ready ## the same model learns to use a calculator, in episodes
	@$(MAKE) --silent $(VENV)/.ready-$(ACCELERATOR)
	$(ON_DEVICE)$(BIN)/python -m train.real --recipe real_agent $(ARGS)

# All tests of the files in ARGS, or those with the marks $(1).
define run-tests
	$(BIN)/python $(PYTEST) -m "$(if $(call tests,all),$(1),not thorough)" $(addprefix --deselect=,$(ELSEWHERE)) $(ARGS)
endef

test: $(VENV)/.ready ## every function, loss, layout, reader and command once
	$(call run-tests,$(MARKS))

test-all: $(VENV)/.ready ## the same statements in more settings, too
	$(call run-tests,not thorough)

check: lint types test ## lint, types and test: what CI runs first

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
	@echo docs/_build/index.html

include .ci/more.mk
