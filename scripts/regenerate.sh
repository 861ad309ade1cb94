#!/usr/bin/env bash
# Makes again what is made from code and results: the tables of schemes and results, the gallery, the model cards,
# and what the notebooks show.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env dev
"$ENV_PYTHON" scripts/make_tables.py
"$ENV_PYTHON" scripts/plot_schemes.py docs/images
"$ENV_PYTHON" scripts/run_docs.py docs/notebooks/*.ipynb
