#!/usr/bin/env bash
# From a bare clone to a model with a longer context: environment, installation, then measure, patch, calibrate, fine-tune,
# measure again.
#
#   bash scripts/quickstart.sh                                    the small base of the package: two to three minutes on two
#                                                                 idle cores, no download but the installation
#   bash scripts/quickstart.sh --resume                           goes on with the newest run that was interrupted
#   bash scripts/quickstart.sh --model DIR --data FILE...         your checkpoint and text
#   bash scripts/quickstart.sh --help                             options of `hf-posenc extend`
#
# ACCELERATE_ARGS holds options for `accelerate launch`, e.g. ACCELERATE_ARGS="--multi_gpu --num_processes 4".
set -euo pipefail
PROJECT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$PROJECT/scripts/setup_env.sh"
embedded=yes # no checkpoint was named: the one of the package is taken
for word in "$@"; do
    case "$word" in --model | --model=* | --config | --config=*) embedded="" ;; esac
done
case " $* " in
    *" --help "* | *" -h "* | *" --resume "*) ;;
    *)
        if [ -n "$embedded" ]; then
            say "This takes about three minutes on two idle cores: one or two to install (the first time only), then" \
                "about one and a half to swap the positions of a small base, calibrate, fine-tune and measure." \
                "On a busy machine it takes longer; every step below says how far it is."
        fi
        ;;
esac
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
        --help | -h) exec "$ENV_PYTHON" -m hf_posenc extend "$1" ;;
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

if [ -n "$embedded" ]; then
    # The base is too small to copy what it has read, with its own positions too: its retrieval is at chance.
    arguments=(--trials 0 ${arguments[@]+"${arguments[@]}"})
fi
# Threads that wait do so asleep. OpenMP's own choice is that they spin, which is a little faster on an idle machine; where
# another process wants the core, a thread that has work waits for one that spins, and a step of 0.1 s takes many seconds.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
if [ -n "$embedded" ]; then
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # one thread: on two idle cores it took 75 s, two took 89 s
fi
code=0
if [ -n "${ACCELERATE_ARGS:-}" ]; then
    read -r -a launch <<<"$ACCELERATE_ARGS"
    "$ENV_PYTHON" -m accelerate.commands.launch "${launch[@]}" -m hf_posenc.recipes.extend_context "${arguments[@]}" || code=$?
else
    # One process needs no launcher, which at Ctrl-C would end with a traceback while the recipe is still saving. On a CPU
    # it gets the cores that nobody else keeps busy: threads wait for each other, and so all of them for one without a core.
    if [ -z "${OMP_NUM_THREADS:-}" ]; then
        read -r cores free < <("$ENV_PYTHON" -c 'import os, psutil
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1
busy = psutil.cpu_percent(interval=1) / 100 * psutil.cpu_count()
print(cores, max(1, round(cores - busy)))')
        export OMP_NUM_THREADS="$free"
        [ "$free" = "$cores" ] || say "Idle cores: $free of $cores, which are used. OMP_NUM_THREADS=$cores uses all."
    fi
    "$ENV_PYTHON" -m hf_posenc extend "${arguments[@]}" || code=$?
fi
if [ "$code" != 0 ]; then
    exit "$code"
fi

quoted() { printf '%q' "$1"; }
python="$(quoted "$ENV_PYTHON")"
posenc="$(quoted "$(dirname "$ENV_PYTHON")/hf-posenc")"
prompt="Once upon a time"
if [ -n "$embedded" ]; then
    prompt="def main("
fi
cat <<NEXT

To look at:
  $output/model          the checkpoint, with its model card
  $output/results.json   every number

Next, for instance:
  $python - $(quoted "$output/model") "$prompt" <<'PYTHON'
import sys, hf_posenc, transformers
model = hf_posenc.from_pretrained(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
inputs = tokenizer(sys.argv[2], return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=400, do_sample=True, temperature=0.7)[0]))
PYTHON

  bash $(quoted "$PROJECT/scripts/quickstart.sh") --scheme shaw --scheme-args max_distance=64
  bash $(quoted "$PROJECT/scripts/quickstart.sh") --model DIR_OR_HUB_ID --data TEXT_FILE... --train-length 2048 --lengths 1024 2048 4096
  $posenc evaluate --model $(quoted "$output/model") --data TEXT_FILE...
  $posenc compare --model DIR_OR_HUB_ID --data TEXT_FILE... --variants unpatched alibi nope

NEXT
if [ -f "$output/results.json" ]; then # what came of it, good or bad, comes last
    "$ENV_PYTHON" -c 'import json, sys
from hf_posenc.recipes.run_report import verdict
print(verdict(json.load(open(sys.argv[1], encoding="utf-8"))))' "$output/results.json"
fi
