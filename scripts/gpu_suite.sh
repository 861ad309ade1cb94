#!/usr/bin/env bash
# What this package computes, and how fast, on one GPU: at most ten minutes. Files are written as it goes.
#
#   bash scripts/gpu_suite.sh FOLDER              tests against float64, attention at 4k to 64k, models of 1B's shape
#   bash scripts/gpu_suite.sh FOLDER --dry-run    the same on a CPU, on a few tokens; the numbers mean nothing there
#   bash scripts/gpu_suite.sh FOLDER CHECKPOINT TEXT
#                                                 also swaps of a checkpoint's positions, calibrated and fine-tuned, such as
#                                                 that of scripts/get_smollm2.py; a second run goes on with these
#   STAGES="models" bash scripts/gpu_suite.sh FOLDER
#
# It runs with the Python that has torch, transformers and pytest: PYTHON, or the first python3. On several cards, run it
# once for each, with CUDA_VISIBLE_DEVICES and a folder of its own.
set -uo pipefail
if [ $# -lt 1 ] || { [ $# -eq 2 ] && [ "$2" != "--dry-run" ]; }; then
    sed -n 's/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed 1d
    exit 2
fi
mkdir -p "$1" || exit 2
folder="$(cd "$1" && pwd)"
checkpoint="${2:-}" text="${3:-}"
[ ! -e "$checkpoint" ] || checkpoint="$(realpath "$checkpoint")"
[ ! -e "$text" ] || text="$(realpath "$text")"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python="${PYTHON:-python3}"
stages="${STAGES:-tests models attention compiled swaps}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

run() { # NAME SECONDS COMMAND...: a stage by itself, whose failure or end of time leaves the next ones alone
    local name="$1" seconds="$2" code=0
    shift 2
    case " $stages " in *" $name "*) ;; *) return 0 ;; esac
    echo "== $name, at most $seconds seconds"
    timeout --kill-after=10 "$seconds" "$@" >"$folder/$name.log" 2>&1 || code=$?
    tail -n "${LINES_SHOWN:-15}" "$folder/$name.log"
    echo "$name $code" >>"$folder/codes.txt"
    [ "$code" = 0 ] || failed=1
}

failed=0
: >"$folder/codes.txt"
measure="scripts/benchmark_attention.py" swaps="scripts/measure_swaps.py"
if [ "${2:-}" = "--dry-run" ]; then
    export HF_POSENC_DEVICE=cpu
    run tests 300 "$python" -m pytest -p no:benchmark -q -m gpu tests/numbers/test_gpu.py -k "alibi or t5"
    run models 300 "$python" "$measure" --device cpu --whole-models --lengths 32 --rounds 1 --schemes alibi \
        --output "$folder/models.json"
    run attention 300 "$python" "$measure" --device cpu --lengths 64 --dtypes float32 --rounds 1 \
        --schemes alibi forgetting far_rope --output "$folder/attention.json"
    run compiled 300 "$python" "$measure" --device cpu --whole-models --lengths 32 --rounds 1 --schemes alibi \
        --phases "compiled prompt" --compile alibi --output "$folder/compiled.json"
    run swaps 300 "$python" "$swaps" hf_posenc/recipes/embedded_base docs/theory.md --device cpu --schemes alibi \
        --starts outputs --length 32 --calibrate-length 32 --calibrate-windows 96 --steps 2 --lengths 32 \
        --held-out-tokens 256 --tokens 256 --json "$folder/swaps.json"
else
    run tests 180 "$python" -m pytest -p no:benchmark -q -m gpu --durations=12 tests/numbers
    run models 190 "$python" "$measure" --device cuda --whole-models --lengths 4096 16384 --rounds 3 \
        --schemes alibi transformer_xl shaw far_rope forgetting t5 kerple --output "$folder/models.json"
    run attention 70 "$python" "$measure" --device cuda --lengths 4096 16384 65536 --dtypes bfloat16 --rounds 3 \
        --heads 32 --kv-heads 8 --phases forward forward+backward --candidates auto flash cudnn \
        --schemes alibi transformer_xl shaw far_rope forgetting t5 kerple --output "$folder/attention.json"
    run compiled 90 "$python" "$measure" --device cuda --whole-models --lengths 4096 --rounds 3 \
        --phases "compiled training" "compiled prompt" --schemes alibi transformer_xl t5 \
        --compile stock alibi transformer_xl t5 --output "$folder/compiled.json"
    [ -z "$checkpoint" ] || run swaps 70 "$python" "$swaps" "$checkpoint" "$text" --device cuda --starts outputs \
        --schemes transformer_xl shaw alibi --calibrate-windows 200 --steps 60 --lengths 512 2048 --tokens 100000 \
        --json "$folder/swaps.json"
fi
echo "== files are in $folder"
exit "$failed"
