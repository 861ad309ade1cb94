#!/usr/bin/env bash
# From a bare clone to a model with a longer context: environment, installation, then measure, patch, calibrate, fine-tune,
# measure again, report.
#
#   bash scripts/quickstart.sh                                    the embedded default: minutes on two cores, no download
#                                                                 but the installation
#   bash scripts/quickstart.sh --resume                           goes on with the newest run that was interrupted
#   bash scripts/quickstart.sh --model DIR --data FILE...         your checkpoint and text
#   bash scripts/quickstart.sh --help                             every option of recipes/extend_context.py
#
# ACCELERATE_ARGS holds options for `accelerate launch`, e.g. ACCELERATE_ARGS="--multi_gpu --num_processes 4".
set -euo pipefail
PROJECT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$PROJECT/scripts/setup_env.sh"
setup_env recipes

# Default of --output: a fresh folder each time, so that a second run neither fails nor overwrites the first; with --resume
# the newest one whose run has not ended.
output=""
resume=""
config=""
arguments=("$@")
while [ $# -gt 0 ]; do
    case "$1" in
        --output) output="${2:-}" ;;
        --output=*) output="${1#--output=}" ;;
        --config) config="${2:-}" ;;
        --config=*) config="${1#--config=}" ;;
        --resume) case "${2:-}" in [Ff]alse | no | 0) ;; *) resume=yes ;; esac ;;
        --help | -h) exec "$ENV_PYTHON" "$PROJECT/recipes/extend_context.py" --help ;;
    esac
    shift
done
if [ -z "$output" ] && [ -f "$config" ]; then # a file may say both too; what is wrong with it the recipe will say
    {
        read -r output || true
        read -r resume || true
    } < <("$ENV_PYTHON" -c 'import sys, yaml
said = yaml.safe_load(open(sys.argv[1]))
print(said.get("output") or "", "yes" if said.get("resume") else sys.argv[2], sep="\n")' "$config" "$resume" 2>/dev/null)
fi
if [ -z "$output" ] && [ -n "$resume" ]; then
    for file in $(ls -t runs/quickstart/progress.json runs/quickstart-[0-9]*/progress.json 2>/dev/null); do
        if [ ! -e "${file%/*}/results.json" ]; then
            output="${file%/*}"
            break
        fi
    done
    if [ -z "$output" ]; then
        say "error: --resume: there is no interrupted run in runs/quickstart*. Without --resume one begins; --output names another."
        exit 2
    fi
    say "Going on with $output"
    arguments+=(--output "$output")
elif [ -z "$output" ]; then
    output="runs/quickstart"
    number=2
    while [ -e "$output" ]; do
        output="runs/quickstart-$number"
        number=$((number + 1))
    done
    arguments+=(--output "$output")
fi

recipe=("$PROJECT/recipes/extend_context.py" "${arguments[@]}")
code=0
if [ -n "${ACCELERATE_ARGS:-}" ]; then
    read -r -a launch <<<"$ACCELERATE_ARGS"
    "$ENV_PYTHON" -m accelerate.commands.launch "${launch[@]}" "${recipe[@]}" || code=$?
else
    # One process needs no launcher, which at Ctrl-C would end with a traceback while the recipe is still saving. On a CPU
    # it gets every core.
    cores="$("$ENV_PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)')"
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-$cores}" "$ENV_PYTHON" "${recipe[@]}" || code=$?
fi
if [ "$code" != 0 ]; then
    exit "$code"
fi

cat <<NEXT

Done. To look at:
  $output/report.html    tables, loss curve, loss by position, retrieval, configuration: one file
  $output/model          the checkpoint, with its model card
  $output/results.json   every number

Next, for instance:
  $ENV_PYTHON -c "
import hf_posenc, transformers
model = hf_posenc.from_pretrained('$output/model')
tokenizer = transformers.AutoTokenizer.from_pretrained('$output/model')
inputs = tokenizer('def main(', return_tensors='pt')
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=400, do_sample=True, temperature=0.7)[0]))"

  bash scripts/quickstart.sh --scheme shaw --scheme-args max_distance=64
  bash scripts/quickstart.sh --model DIR_OR_HUB_ID --data TEXT_FILE... --train-length 2048 --lengths 1024 2048 4096
  $ENV_PYTHON recipes/evaluate.py --model $output/model --data TEXT_FILE...
  $ENV_PYTHON recipes/compare_schemes.py --model DIR_OR_HUB_ID --data TEXT_FILE... --variants unpatched alibi nope
NEXT
