#!/usr/bin/env bash
# Everything about the CUDA path that only a GPU can tell, in one command, without a network:
#
#   bash tools/gpu_check.sh                # the embedded pair, in the shapes of Pythia-2.8B and 70M
#   bash tools/gpu_check.sh TARGET DRAFT   # two checkpoint folders instead
#   bash tools/gpu_check.sh --dry          # tiny shapes, the CPU if need be: does this script run?
#
# First what is there, the tests marked cuda, and exactness in float32. Then, at those shapes: every
# method, with graphs and without, beside rounding alone (ar rows=...); profiles of iterations; step
# times in both 16-bit types beside the bandwidth floor; memory at 2,048 tokens. It is meant to take
# eight minutes on a large GPU, which is not measured. A step that fails, or takes three times what is
# allowed for it, stops no other; the end names it.
#
# Leaves its log, tables and profiles in results/run_gpu_<device>_<time>, and every method's table also
# as results/gpu_<device>.json, or as gpu_<device>_2.json and so on beside earlier ones: no file that
# exists is touched. Prints that table last. What was measured stays when a step fails or Ctrl-C or
# kill ends it, and then so does the enlarged pair, 6 GB, with which to go on. A dry run leaves nothing.
set -euo pipefail
unset CDPATH  # with it, cd may go elsewhere and say where

refuse() {  # what is wrong, in one line
  echo "error: $1" >&2
  exit 2
}
print_help() {  # and the lines at the top
  local line
  echo "usage: bash tools/gpu_check.sh [--dry] [TARGET DRAFT]"
  echo
  while IFS= read -r line; do
    case $line in
      '#!'*) ;;
      '#'*)
        line=${line#'#'}
        echo "${line# }"
        ;;
      *) return ;;
    esac
  done <"${BASH_SOURCE[0]}"
}

dry=false
folders=()
for argument in "$@"; do
  case $argument in
    -h | --help)
      print_help
      exit 0
      ;;
    --dry)
      if $dry; then refuse "--dry is there twice"; fi
      dry=true
      ;;
    -*) refuse "there is no option $(printf %q "$argument") (--help tells of all)" ;;
    *) folders+=("$argument") ;;
  esac
done
if [ ${#folders[@]} -ne 0 ] && [ ${#folders[@]} -ne 2 ]; then
  refuse "there are two folders, TARGET and DRAFT, or none; given: ${#folders[@]} (--help tells more)"
fi
models=()
for folder in ${folders[@]+"${folders[@]}"}; do
  if [ ! -f "$folder/config.json" ]; then
    refuse "$(printf %q "$folder") is no checkpoint folder: it has no config.json"
  fi
  place=$(cd -- "$folder" 2>/dev/null && pwd) || refuse "$(printf %q "$folder") cannot be entered"
  models+=("$place")  # from wherever this is run
done
if [ ${#models[@]} -ne 0 ]; then
  models=(--target "${models[0]}" --draft "${models[1]}")
fi
for program in python realpath timeout; do
  if ! command -v "$program" >/dev/null; then
    refuse "there is no $program on the PATH; python is one with what requirements.txt lists"
  fi
done
cd -- "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")/.."

describe='
import platform, torch

n = torch.cuda.device_count() if torch.cuda.is_available() else 0
print("Python", platform.python_version(), "and torch", torch.__version__)
print(f"This torch was built for CUDA {torch.version.cuda} and sees {n} GPUs")
for index in range(n):
    gpu = torch.cuda.get_device_properties(index)
    memory = f"{gpu.total_memory / 1e9:.1f} GB"
    print(f"cuda:{index}: {gpu.name}, {memory}, compute capability {gpu.major}.{gpu.minor}")
'
versions() {
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=driver_version,name,memory.total --format=csv || true
  else
    echo "no nvidia-smi, so the driver is not known"
  fi
  python -c "$describe"
}

choose='
import re

import torch

from benchmark.machine import processor
from cli.models import choose_device, has_instructions
from methods import METHODS

device = choose_device(None)
dtypes = ["float32"]
if device.type == "cuda":
    dtypes = ["float16"] + ["bfloat16"] * has_instructions(torch.bfloat16, device)
name = re.sub("[^a-z0-9]+", "_", processor(device).lower()).removeprefix("nvidia_")
print(device.type, name, ",".join(METHODS), *dtypes)
'
if ! found=$(python -c "$choose" 2>&1); then
  refuse "python cannot run this; pip install -r requirements.txt: ${found##*$'\n'}"
fi
read -r device name methods dtypes <<<"${found##*$'\n'}"  # before it come warnings, if any
dtype=${dtypes%% *}
if [ -z "$dtype" ]; then
  refuse "python does not tell what it computes on: ${found##*$'\n'}"
fi
if ! $dry && [ "$device" = cpu ]; then
  refuse "torch sees no GPU: docs/gpu.md, Installing, has what it wants; --dry needs none"
fi

# Beside every method rounding alone, the other way to commit and, on a GPU, launches one by one
methods="$methods,ar rows=8,ar rows=16,ar rows=32,dynatree rebuild"
graphs=("")
if [ "$device" = cuda ]; then
  methods="$methods,ar eager,dynatree eager"
  graphs=("" --no-graphs)
fi
# Of step times: the middle of a short text, and where 128 rows end at 2,048 slots
declare -A lengths=([short]=150 [long]=1856)
patience=3
if $dry; then
  patience=20  # the machine may be busy, the device pretended
  work=$(mktemp -d 2>/dev/null) || refuse "no folder can be made in ${TMPDIR:-/tmp}"
  target_shape=(models/tiny/draft --hidden 256 --layers 3 --vocab 4200)
  draft_shape=(models/tiny/draft --hidden 256 --layers 2 --vocab 4200)
  sizes=(--n-prompts 1 --prompt-tokens 20 --new-tokens 12)
  full=(--n-prompts 1 --prompt-tokens 20 --new-tokens 12)
  export OMP_NUM_THREADS=1  # a second thread costs more than it computes at these shapes
else
  work=results/run_gpu_${name}_$(date +%Y%m%d-%H%M%S)
  # Not one that is there, which a second run would share
  { mkdir -p results && mkdir "$work"; } 2>/dev/null || refuse "$PWD/$work cannot be made"
  target_shape=(models/tiny/target --hidden 2560 --layers 32 --vocab 50304)
  draft_shape=(models/tiny/draft --hidden 512 --layers 6 --vocab 50304)
  sizes=(--n-prompts 4 --prompt-tokens 150 --new-tokens 128)
  full=(--n-prompts 1 --prompt-tokens 150 --new-tokens 1856)
fi
enlarged=$work/pair
clean() {  # nothing but what this run has made
  local status=$?
  if $dry; then
    rm -rf "$work"
    if [ "$status" -ne 0 ]; then echo "a dry run leaves nothing, no results either" >&2; fi
  elif [ "$status" -eq 0 ]; then
    rm -rf "$enlarged"
  else
    echo "what was measured is in $PWD/$work" >&2
    if [ -d "$enlarged" ]; then
      echo "the enlarged pair stays, to go on with: rm -r $(printf %q "$PWD/$enlarged") when done" >&2
    fi
  fi
}
trap clean EXIT

failed=()
step() {  # a name, and the seconds that are allowed for it
  current=$1
  limit=$((patience * $2))
  printf '\n== %s (%s s allowed for, %s s so far)\n' "$1" "$2" "$SECONDS"
}
check() {  # a command, and go on whatever becomes of it; interrupted, bench.py keeps what it has
  timeout --foreground --signal=INT --kill-after=20 "$limit" "$@" && return
  local status=$?
  [ "$status" -ne 130 ] || exit 130  # Ctrl-C
  echo "FAILED with status $status" >&2
  failed+=("$current")
}

publish() {  # every method's table, beside earlier ones
  local file=results/gpu_$name.json
  local part=$work/.every.json
  local n=1
  while [ -e "$file" ] || [ -L "$file" ]; do
    n=$((n + 1))
    file=results/gpu_${name}_$n.json
  done
  trap '' INT TERM HUP  # for this moment
  if cp "$work/every.json" "$part" && mv -n "$part" "$file" && [ ! -e "$part" ]; then
    echo "every method's table is also $file"
  else
    rm -f "$part"
    echo "FAILED: $file cannot be written; $work/every.json stays" >&2
    failed+=("$current")
  fi
  trap 'exit 130' INT
  trap - TERM HUP
}

run_all() {
  trap 'exit 130' INT  # once what runs has ended, whatever status that gives
  step "what is there" 20
  versions

  step "tests marked cuda" 60
  check python -m pytest -q -n 0 -W default -m cuda tests

  step "exactness in float32, embedded pair" 60
  check python bench.py --device "$device" --dtype float32 "${sizes[@]}" --methods "$methods" \
    --target models/tiny/target --draft models/tiny/draft \
    --columns throughput,speedup,exact --output "$work/exact.json"

  if [ ${#models[@]} -eq 0 ]; then
    step "enlarging the embedded pair" 60
    check python tools/enlarge.py "${target_shape[@]}" "$enlarged/target"
    check python tools/enlarge.py "${draft_shape[@]}" "$enlarged/draft"
    models=(--target "$enlarged/target" --draft "$enlarged/draft")
  fi
  models+=(--device "$device")

  step "every method, $dtype" 90
  # Of the strict rows, too, every text must be its reference's: else this step fails
  check python bench.py "${models[@]}" --dtype "$dtype" "${sizes[@]}" \
    --methods "$methods,dynatree strict,recycle strict" \
    --output "$work/every.json" >"$work/every.txt"

  step "profiles of iterations, $dtype" 40
  local method
  for method in ar dynatree; do
    check python tools/profile_iteration.py "$work/profile_$method" --method "$method" \
      "${models[@]}" --dtype "$dtype"
  done

  local type graph context
  for type in $dtypes; do
    for graph in "${graphs[@]}"; do
      for context in short long; do
        step "step times, $type, $context context${graph:+, $graph}" 12
        # shellcheck disable=SC2086 # no word at all for graphs
        check python bench.py --table steps "${models[@]}" --dtype "$type" $graph \
          --prompt-tokens "${lengths[$context]}" --new-tokens 128 \
          --output "$work/steps_${type}_$context$graph.json"
      done
    done
  done

  step "memory, up to 2,048 tokens" 50
  check python bench.py --table memory "${models[@]}" --dtype "$dtype" "${full[@]}" \
    --methods ar,dynatree --output "$work/memory.json"

  step "results" 10
  if [ -e "$work/every.json" ]; then  # all of it, or what was measured before something failed
    if ! $dry; then publish; fi
    check python bench.py --show "$work/every.json" \
      --columns throughput,speedup,predicted,tokens_per_iter,draft,verify,other,exact
  fi
  if [ ${#failed[@]} -gt 0 ]; then
    echo "error: after $SECONDS s these have failed, see above:"
    printf '  %s\n' "${failed[@]}"
    return 1
  fi
  echo "all steps done after $SECONDS s"
}

# Whoever asks this script to end, be it with kill, asks all that it runs: a group of processes
running=
stopped=0
stop() {  # by a signal, and then with its status
  stopped=$2
  if [ -n "$running" ]; then
    kill -s "$1" -- "-$running" 2>/dev/null || true
  fi
}
trap 'stop INT 130' INT
trap 'stop TERM 143' TERM
trap 'stop HUP 129' HUP
trap '' TTOU  # a group behind the terminal's own writes to it, whatever stty says
set -m
run_all </dev/null 2>&1 | tee -i "$work/log.txt" &
set +m
running=$(jobs -p)
[ "$stopped" -eq 0 ] || stop TERM "$stopped"  # asked before there was one
status=0
wait %1 || status=$?
while [ "$stopped" -ne 0 ] && ! wait; do :; done  # each signal cuts it short
[ "$stopped" -eq 0 ] || status=$stopped
exit "$status"
