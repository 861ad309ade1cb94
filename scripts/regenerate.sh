#!/usr/bin/env bash
# Makes again what is made from code and results: the tables of schemes, results and calibrations, the leaderboard, the gallery, the committed sweeps and model cards,
# and what the notebooks show.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env dev
"$ENV_PYTHON" scripts/make_scheme_table.py
"$ENV_PYTHON" scripts/make_result_table.py
"$ENV_PYTHON" scripts/make_calibration_tables.py
"$ENV_PYTHON" scripts/make_results_page.py
"$ENV_PYTHON" scripts/plot_schemes.py docs/images
"$ENV_PYTHON" recipes/sweep.py model_cards/results/books model_cards/results/stories260K >/dev/null
"$ENV_PYTHON" scripts/make_model_card.py --committed
"$ENV_PYTHON" scripts/run_notebooks.py
