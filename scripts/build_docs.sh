#!/usr/bin/env bash
# Builds the documentation site; any link, anchor or name that leads nowhere is an error.
#
#   bash scripts/build_docs.sh [FOLDER]     by default site/; open its index.html, no server is needed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env docs

# The variable silences a banner about the successors of mkdocs and its theme, which is no warning of the build.
NO_MKDOCS_2_WARNING=1 "$ENV_PYTHON" -m mkdocs build --strict --site-dir "${1:-site}"
say "Built: ${1:-site}/index.html"
