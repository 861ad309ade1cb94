#!/usr/bin/env bash
# Makes the virtual environment of this checkout and installs the package into it, editable, in the versions of
# constraints.txt. A second call does nothing until pyproject.toml or constraints.txt change.
#
#   bash scripts/setup_env.sh [EXTRAS]      EXTRAS: comma-separated, e.g. dev or recipes,plots; none by default
#
# Other scripts source it for the functions; after setup_env, $ENV_PYTHON is the interpreter to run:
#
#   source scripts/setup_env.sh
#   setup_env recipes
#   "$ENV_PYTHON" -m hf_posenc extend
#
# PYTHON names the interpreter to start from, VENV another folder than .venv; pip's own settings (PIP_INDEX_URL,
# PIP_FIND_LINKS, its configuration file) hold as usual. Needs bash 3.2, Python 3.11 or newer, and what pip downloads from.

PROJECT_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# say TEXT...: one line to the terminal, apart from what a script prints as its result.
say() { printf '%s\n' "$*" >&2; }

# find_python: prints an interpreter that is new enough.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 </dev/null; then
            # The real path: shims of version managers depend on the folder they are called from.
            "$candidate" -c 'import sys; print(sys.executable)' </dev/null
            return
        fi
        if [ "$candidate" = "${PYTHON:-}" ]; then
            say "error: PYTHON=$PYTHON is no Python 3.11 or newer"
            return 1
        fi
    done
    say "error: no Python 3.11 or newer on PATH (python3: $(python3 -V 2>&1 | tail -n 1))." \
        "Install one, or name it: PYTHON=/path/to/python3 bash $0"
    return 1
}

# make_venv FOLDER: makes a virtual environment there, unless a working one exists; sets ENV_PYTHON.
make_venv() {
    local folder="$1" base output
    ENV_PYTHON="$folder/bin/python"
    if "$ENV_PYTHON" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 </dev/null; then
        return
    fi
    base="$(find_python)" || return 1
    say "Making $folder with $("$base" -V) ..."
    # --clear: what is there may be half made, or belong to an interpreter that is gone.
    if ! output="$("$base" -m venv --clear "$folder" 2>&1 </dev/null)"; then
        say "$output"
        say "error: $base cannot make a virtual environment. On Debian and Ubuntu: apt install python3-venv"
        return 1
    fi
}

# fingerprint TEXT FILE...: a digest of a text, of files and of the interpreter, which a stamp file remembers.
fingerprint() {
    "$ENV_PYTHON" - "$@" <<'PYTHON'
import hashlib, pathlib, sys
digest = hashlib.sha256("\0".join([sys.version, *sys.argv[1:]]).encode())
for name in sys.argv[2:]:
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest())
PYTHON
}

# pip_install ARGUMENT...: pip, silent unless it fails, but for a line every 20 seconds that says it is still at it.
pip_install() {
    local log start clock code=0
    log="$(mktemp)"
    start="$SECONDS"
    # It ends by itself when this script does, however that ends.
    (while sleep 20 >/dev/null 2>&1 && kill -0 $$; do say "... installing, $((SECONDS - start)) seconds so far"; done) &
    clock=$!
    "$ENV_PYTHON" -m pip install --disable-pip-version-check --no-input --quiet --progress-bar off "$@" \
        >"$log" 2>&1 </dev/null || code=$?
    { kill "$clock" && wait "$clock"; } 2>/dev/null || true
    if [ "$code" = 0 ]; then
        rm -f "$log"
        return
    fi
    # Retries and unusable index entries come as hundreds of warnings; the end says what went wrong.
    grep -v '^WARNING:' "$log" | tail -n 15 >&2
    # Without a network pip ends on "from versions: none", as it does where an index lacks a package.
    if grep -qiE 'ConnectionError|NameResolutionError|Timeout|ProxyError|SSLError|name resolution|from versions: none' "$log"; then
        say "error: pip could not reach a package index that holds what is needed. Without a network, point it at a folder" \
            "of wheels: PIP_NO_INDEX=1 PIP_FIND_LINKS=/path/to/wheels bash $0"
    fi
    say "error: installation failed; the end of pip's output is above, all of it in $log"
    return 1
}

# setup_env [EXTRAS]: the project's environment, ready; sets ENV_PYTHON.
setup_env() {
    local extras="${1:-}" stamp wanted
    make_venv "${VENV:-$PROJECT_ROOT/.venv}" || return 1
    stamp="$(dirname "$ENV_PYTHON")/../hf_posenc-installed${extras:+-$extras}"
    # The root is part of it: an editable installation points at the checkout, and checkouts are moved and copied.
    wanted="$(fingerprint "$PROJECT_ROOT" "$PROJECT_ROOT/pyproject.toml" "$PROJECT_ROOT/constraints.txt")" || return 1
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    say "Installing hf_posenc${extras:+[$extras]} and what it needs: one or two minutes, and 1 GB or more to download, the first time ..."
    rm -f "$stamp" # an interrupted installation counts as none
    pip_install -c "$PROJECT_ROOT/constraints.txt" -e "$PROJECT_ROOT${extras:+[$extras]}" || return 1
    printf '%s\n' "$wanted" >"$stamp"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    setup_env "${1:-}"
    say "Ready: $ENV_PYTHON"
fi
