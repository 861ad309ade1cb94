#!/usr/bin/env bash
# From a bare clone to a model with a longer context: environment, installation, measure, patch, fine-tune, measure, report.
#
#   bash scripts/quickstart.sh                                    the embedded default: minutes on two cores, no download
#                                                                 but the installation
#   bash scripts/quickstart.sh --model DIR --data FILE...         your checkpoint and text
#   bash scripts/quickstart.sh --help                             every option of recipes/extend_context.py
#
# ACCELERATE_ARGS holds options for `accelerate launch`, e.g. ACCELERATE_ARGS="--multi_gpu --num_processes 4".
set -euo pipefail
PROJECT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$PROJECT/scripts/setup_env.sh"
setup_env recipes

# Default of --output: a fresh folder each time, so that a second run neither fails nor overwrites the first.
output=""
arguments=("$@")
while [ $# -gt 0 ]; do
    case "$1" in
        --output) output="${2:-}" ;;
        --output=*) output="${1#--output=}" ;;
        --help | -h) exec "$ENV_PYTHON" "$PROJECT/recipes/extend_context.py" --help ;;
    esac
    shift
done
if [ -z "$output" ]; then
    output="runs/quickstart"
    number=2
    while [ -e "$output" ]; do
        output="runs/quickstart-$number"
        number=$((number + 1))
    done
    arguments+=(--output "$output")
fi

# One process, said in full: what is left open accelerate launch fills in with a warning. On a CPU it gets every core.
launch=(--num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no)
launch+=(--num_cpu_threads_per_process "$("$ENV_PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)')")
if [ -n "${ACCELERATE_ARGS:-}" ]; then
    read -r -a launch <<<"$ACCELERATE_ARGS"
fi
code=0
"$ENV_PYTHON" -m accelerate.commands.launch "${launch[@]}" "$PROJECT/recipes/extend_context.py" "${arguments[@]}" || code=$?
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
  bash scripts/quickstart.sh --model DIR_OR_HUB_ID --data TEXT_FILE... --train-length 2048 --eval-lengths 1024 2048 4096
  $ENV_PYTHON recipes/evaluate.py --model $output/model --data TEXT_FILE...
  $ENV_PYTHON recipes/compare_schemes.py --model DIR_OR_HUB_ID --data TEXT_FILE... --variants unpatched alibi nope
NEXT
