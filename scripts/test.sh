#!/usr/bin/env bash
# All checks, from a bare clone: environment, lint, format, spelling, types, tests.
#
#   bash scripts/test.sh [PYTEST ARGUMENTS]     e.g. bash scripts/test.sh tests/project/test_readme.py -k table -n 0
#
# With CI=true also the slow tests, the documentation site among them, and the tests on the oldest supported versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
extras=dev
if [ "${CI:-}" = "true" ]; then
    extras=dev,docs
fi
setup_env "$extras"

# Nothing here may need a network, and a model found in somebody's cache would hide that.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
# Forked data loaders would otherwise make tokenizers warn, and warnings are errors.
export TOKENIZERS_PARALLELISM=false

say "== ruff"
"$ENV_PYTHON" -m ruff check .
"$ENV_PYTHON" -m ruff format --check .
say "== codespell"
"$ENV_PYTHON" -m codespell_lib .
say "== mypy"
"$ENV_PYTHON" -m mypy
say "== pytest"
# Two workers, which share the tests; -n 0 among the arguments, and pytest by itself, run in one process.
"$ENV_PYTHON" -m pytest -n 2 --dist worksteal --durations=15 --durations-min=2 "$@"

if [ "${CI:-}" = "true" ]; then
    say "== pytest, slow tier"
    code=0
    "$ENV_PYTHON" -m pytest -m "slow and not gpu" -n 2 --dist worksteal "$@" || code=$?
    # 5: nothing was collected, which is no failure where no test of the selection is slow.
    if [ "$code" != 0 ] && [ "$code" != 5 ]; then
        exit "$code"
    fi
    say "== pytest, oldest supported versions"
    bash scripts/test_oldest.sh
fi
say "== all passed"
