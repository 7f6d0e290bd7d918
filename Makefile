PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PEERS  := .venv-peers
SAEBENCH ?= .venv-saebench
DEMO   := runs/demo
MINUTES ?= 60

.DEFAULT_GOAL := help
.PHONY: help setup assets demo test browser check docs results bench bench-peers saebench-env test-saebench test-formats clean

help:  ## say what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[dev,docs]'
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt dictionary-learning einops
	@touch $@

setup: $(READY)  ## a virtual environment with pinned installs

assets: $(READY)  ## the default model and corpus (141 MB to fetch, once)
	$(BIN)/dmsae assets fetch

demo: assets  ## from nothing to distilled cores, the SAEs trained from them, and their controls, in minutes
	@echo "\n1. The paper's core: encoder rows are frozen, and the core fires freely."
	$(BIN)/dmsae distill --recipe demo --out $(DEMO)/paper
	@echo "\n2. SAEs from it, compared with a random core and with none, at two measured L0s."
	$(BIN)/dmsae transfer --recipe demo --core $(DEMO)/paper --k 96 112 --budget total --out $(DEMO)/paper-saes
	@echo "\n3. A core of detectors from the same cycle 0, of latents that fire on at most a fifth of the tokens."
	$(BIN)/dmsae distill --recipe demo --core-mode detector --max-rate 0.2 \
		--cycle0.source $(DEMO)/paper/cycle-0/sae --out $(DEMO)/detectors
	@echo "\n4. SAEs from it, compared with random detectors and with no core, near the same measured L0."
	$(BIN)/dmsae transfer --recipe demo --core $(DEMO)/detectors --core-modes detector --budget total \
		--out $(DEMO)/detector-saes
	$(BIN)/dmsae core show $(DEMO)/detectors --top 12
	@echo "\n5. All of it on one page, with the latents of both cores."
	$(BIN)/dmsae report $(DEMO)/detectors $(DEMO)/detector-saes $(DEMO)/paper $(DEMO)/paper-saes --to $(DEMO)/report.html

check: $(READY)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check assets browser  ## every check and test
	$(BIN)/python -m pytest

# Debian's Chromium for the tests of pages, where it may be installed. Without one, pytest says that they were not run.
browser:
	@command -v chromium google-chrome chrome >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& apt-get update -qq >/dev/null 2>&1 && apt-get install -y -qq chromium >/dev/null 2>&1; } || true

results: $(READY)  ## the results page and its figures, from the JSON in docs/results
	$(BIN)/python -m dmsae.report.results_page docs

docs: $(READY)  ## the documentation site, in site/: open site/index.html, no server needed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "The documentation is in site/index.html"

attack: $(READY)  ## kills, damage, hostile files, full disks and races for an hour (MINUTES=60), counted
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=tests $(BIN)/python tests/attack/run.py --minutes $(MINUTES)

bench: assets  ## measured ratios: tables, and one JSON line each
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/harvest.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/trained_step.py
	$(BIN)/python benchmarks/attribution.py
	$(BIN)/python benchmarks/distill.py
	$(BIN)/python benchmarks/peer_distill.py
	$(BIN)/python benchmarks/mesh.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/sweep.py

$(PEERS)/.ready: constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet torch==2.13.0
	$(PEERS)/bin/python -m pip install --quiet torch==2.13.0 sae-lens==6.54.12
	$(PEERS)/bin/python -m pip install --quiet --no-deps -c constraints.txt dictionary-learning einops
	$(PEERS)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

bench-peers: $(PEERS)/.ready  ## the training step beside dictionary_learning and SAELens
	$(PEERS)/bin/python benchmarks/peers.py

$(SAEBENCH)/.ready: constraints-saebench.txt
	$(PYTHON) -m venv $(SAEBENCH)
	$(SAEBENCH)/bin/python -m pip install --quiet -c $< torch==2.13.0
	$(SAEBENCH)/bin/python -m pip install --quiet -c $< torch==2.13.0 sae-lens transformer-lens datasets numpy pandas \
		pyarrow scikit-learn seaborn tabulate collectibles openai zstandard hf-transfer gguf accelerate xgboost-cpu \
		tyro pytest hypothesis
	$(SAEBENCH)/bin/python -m pip install --quiet --no-deps -c $< sae-bench sae-probes
	$(SAEBENCH)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

saebench-env: $(SAEBENCH)/.ready  ## the environment of SAEBench, which conflicts with ours (2 GB, some minutes)

test-saebench: $(SAEBENCH)/.ready assets  ## agreement with the real SAEBench package
	JAXTYPING_DISABLE=1 $(SAEBENCH)/bin/python -m pytest tests/saebench -W ignore

$(SAEBENCH)/.ready-formats: $(SAEBENCH)/.ready constraints-formats.txt
	$(SAEBENCH)/bin/python -m pip install --quiet --no-deps -r constraints-formats.txt
	@touch $@

test-formats: $(SAEBENCH)/.ready-formats assets  ## the same codes in the real SAELens, SAEBench, dictionary_learning, sparsify
	JAXTYPING_DISABLE=1 $(SAEBENCH)/bin/python -m pytest tests/real_formats -W ignore

clean:  ## remove the virtual environments and caches (never stores or runs)
	rm -rf $(VENV) $(PEERS) $(SAEBENCH) .mypy_cache .ruff_cache .pytest_cache .hypothesis
