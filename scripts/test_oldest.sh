#!/usr/bin/env bash
# Tests on the oldest of everything that is supported (constraints-oldest.txt), in an environment of its own: .venv-oldest.
#
#   bash scripts/test_oldest.sh [PYTEST ARGUMENTS]     without arguments: contract, checkpoints, guards, types, Hub, adapters, data, shared sequences
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh

make_venv "$PWD/.venv-oldest"
stamp="$PWD/.venv-oldest/hf_posenc-installed"
wanted="$(fingerprint "$PWD" pyproject.toml constraints-oldest.txt)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    say "Installing the oldest supported versions (the first time: some minutes and 1 GB or more) ..."
    rm -f "$stamp"
    pip_install -c constraints-oldest.txt -e ".[recipes]" pytest
    printf '%s\n' "$wanted" >"$stamp"
fi

export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false
if [ "$#" -eq 0 ]; then
    set -- tests/patching/test_contract.py tests/patching/test_all_types.py tests/checkpoints/test_checkpoints.py tests/checkpoints/test_guards.py \
        tests/checkpoints/test_hub.py tests/situations/test_every_decoder.py tests/situations/test_own_forwards.py tests/adapters/test_lora.py \
        tests/recipes/test_corpus.py tests/recipes/test_accelerate_configs.py \
        tests/distributed/test_distributed.py::test_trains_alike_on_shared_sequences
fi
exec "$ENV_PYTHON" -m pytest "$@"
