#!/usr/bin/env bash
# Builds what a release consists of, checks it, and tries it as a user would: installed into a clean environment, without
# the repository.
#
#   bash scripts/release.sh                                        everything from a package index: some minutes, 1 GB or more
#   bash scripts/release.sh --dependencies-of .venv/bin/python     what the wheel needs is taken from that environment, the
#                                                                  wheel is not: half a minute, but its requirements are not tried
#   bash scripts/release.sh ... --download                         the ten lines of README.md on the checkpoint that they name
#
# What was built is in dist/, which is emptied first. Nothing is uploaded; the last line says how.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
project="$PWD"

lender=""
download=()
while [ $# -gt 0 ]; do
    case "$1" in
        --dependencies-of) lender="${2:?--dependencies-of needs the python of an environment}" && shift ;;
        --download) download=(--download) ;;
        *) say "error: $1 is no option; the first lines of $0 say which there are" && exit 2 ;;
    esac
    shift
done

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
took() { say "   $((SECONDS - began)) s"; }

say "== build, and twine check --strict"
began=$SECONDS
make_venv "$work/tools"
pip_install "build>=1.3,<2" "twine>=6.2,<8"
rm -rf dist
"$ENV_PYTHON" -m build --outdir dist . >"$work/build.log" 2>&1 || { tail -n 20 "$work/build.log" >&2 && exit 1; }
"$ENV_PYTHON" -m twine check --strict dist/*
took

say "== contents"
"$ENV_PYTHON" scripts/check_distribution.py dist

say "== installation into a clean environment"
began=$SECONDS
make_venv "$work/clean"
wheel="$(echo "$project"/dist/*.whl)"
if [ -n "$lender" ]; then
    # The other environment's packages come after the clean one's own, and its editable installations do not come at all.
    "$lender" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$("$ENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lender.pth"
    pip_install --no-deps "$wheel"
else
    pip_install -c constraints.txt "$wheel"
fi
took

say "== the command, and the ten lines of README.md"
began=$SECONDS
cd "$work"
unset PYTHONPATH
"$ENV_PYTHON" -c "
import hf_posenc, pathlib, sys
assert pathlib.Path(sys.prefix) in pathlib.Path(hf_posenc.__file__).parents, hf_posenc.__file__
print('hf_posenc', hf_posenc.__version__, 'in', sys.prefix)"
"$work/clean/bin/hf-posenc" schemes
if [ "${#download[@]}" = 0 ]; then
    # A tiny model, on a machine that may be busy: threads would wait for each other.
    export HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
fi
"$ENV_PYTHON" "$project/scripts/ten_lines.py" ${download[@]+"${download[@]}"}
took

say "== ready. To publish: python -m twine upload dist/*"
