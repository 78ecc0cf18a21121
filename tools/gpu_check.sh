#!/usr/bin/env bash
# Everything about the CUDA path that only a GPU can tell, in one command, without a network:
#
#   bash tools/gpu_check.sh                # the embedded pair, in the shapes of Pythia-2.8B and 70M
#   bash tools/gpu_check.sh TARGET DRAFT   # two checkpoint folders instead
#   bash tools/gpu_check.sh --dry          # tiny shapes, the CPU if need be: does this script run?
#
# First what is there, the tests marked cuda, and exactness in float32. Then, at those shapes: every
# method, with graphs and without, beside rounding alone (ar rows=...); a profile of an iteration;
# step times in both 16-bit types beside the bandwidth floor; attention and products by themselves;
# memory at 2,048 tokens. It is meant to take eight minutes on a large GPU, which is not measured. A
# step that fails, or takes three times what is allowed for it, stops no other; the end names it.
#
# Leaves its log, tables and profiles in results/run_gpu_<device>_<time>, every method's table also
# in results/gpu_<device>.json, and prints that one last. A dry run leaves nothing.
set -euo pipefail

dry=false
if [ "${1:-}" = --dry ]; then
  dry=true
  shift
fi
if [ $# -ne 0 ] && [ $# -ne 2 ]; then
  echo "usage: bash tools/gpu_check.sh [--dry] [TARGET DRAFT]" >&2
  exit 2
fi
models=()
if [ $# -eq 2 ]; then
  models=(--target "$(realpath "$1")" --draft "$(realpath "$2")")
fi
cd "$(dirname "$0")/.."
export KINETO_LOG_LEVEL=99  # nothing of the profiler itself

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

from benchmark.machine import processor
from cli.models import choose_device, has_bfloat16
from methods import METHODS

device = choose_device(None)
dtypes = ["float32"]
if device.type == "cuda":
    dtypes = ["float16"] + ["bfloat16"] * has_bfloat16(device)
name = re.sub("[^a-z0-9]+", "_", processor(device).lower()).removeprefix("nvidia_")
print(device.type, name, ",".join(METHODS), *dtypes)
'
read -r device name methods dtypes < <(python -c "$choose")
dtype=${dtypes%% *}
if ! $dry && [ "$device" = cpu ]; then
  versions
  echo "error: torch sees no GPU: docs/gpu.md, Installing, has what it wants; --dry needs none" >&2
  exit 2
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
  work=$(mktemp -d)
  target_shape=(models/tiny/draft --hidden 256 --layers 3 --vocab 4200)
  draft_shape=(models/tiny/draft --hidden 256 --layers 2 --vocab 4200)
  sizes=(--n-prompts 1 --prompt-tokens 20 --new-tokens 12)
  full=(--n-prompts 1 --prompt-tokens 20 --new-tokens 12)
  copies=2
  export OMP_NUM_THREADS=1  # a second thread costs more than it computes at these shapes
else
  work=$PWD/results/run_gpu_${name}_$(date +%Y%m%d-%H%M%S)
  mkdir -p "$work"
  target_shape=(models/tiny/target --hidden 2560 --layers 32 --vocab 50304)
  draft_shape=(models/tiny/draft --hidden 512 --layers 6 --vocab 50304)
  sizes=(--n-prompts 4 --prompt-tokens 150 --new-tokens 128)
  full=(--n-prompts 1 --prompt-tokens 150 --new-tokens 1856)
  copies=32
fi
enlarged=$(mktemp -d models/enlarged.XXXXXX)  # here, where there is room for the large pair
clean() {
  rm -rf "$enlarged"
  if $dry; then rm -rf "$work"; fi
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

run_all() {
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

  step "profile of one iteration, $dtype" 25
  check python tools/profile_iteration.py "$work" "${models[@]}" --dtype "$dtype"

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

  step "attention and products by themselves" 20
  local folder
  for folder in "${models[1]}" "${models[3]}"; do
    check python tools/kernel_times.py "$folder" --device "$device" --dtype "$dtype" \
      --copies "$copies"
  done

  step "memory, up to 2,048 tokens" 50
  check python bench.py --table memory "${models[@]}" --dtype "$dtype" "${full[@]}" \
    --methods ar,dynatree --output "$work/memory.json"

  step "results" 10
  if [ -e "$work/every.json" ]; then  # all of it, or what was measured before something failed
    check python bench.py --show "$work/every.json" \
      --columns throughput,speedup,predicted,tokens_per_iter,draft,verify,other,exact
    if ! $dry; then cp "$work/every.json" "results/gpu_$name.json"; fi
  fi
  if [ ${#failed[@]} -gt 0 ]; then
    echo "error: after $SECONDS s these have failed, see above:"
    printf '  %s\n' "${failed[@]}"
    return 1
  fi
  echo "all steps done after $SECONDS s"
}
run_all 2>&1 | tee -i "$work/log.txt"
