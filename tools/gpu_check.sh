#!/usr/bin/env bash
# Everything about the CUDA path that only a GPU can tell, in one command, without a network:
#
#   bash tools/gpu_check.sh                  # the embedded pair, enlarged to Pythia-2.8B and Pythia-70M
#   bash tools/gpu_check.sh TARGET DRAFT     # two checkpoint folders instead
#   bash tools/gpu_check.sh --dry            # tiny shapes on the CPU: does this script run?
#
# Tests marked cuda; exactness in float32; then in float16 step times beside the bandwidth floor,
# memory, every method, the graphs against none (ar eager) and rounding alone (ar rows=16). Leaves
# results/gpu_<device>.json (nothing when dry) and prints its table last.
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
work=$(mktemp -d)
enlarged=$(mktemp -d models/enlarged.XXXXXX)  # here, where there is room for the large pair
trap 'rm -rf "$work" "$enlarged"' EXIT

# Every method there is, rounding alone, and the other way to commit
methods=$(python -c 'from methods import METHODS; print(",".join(METHODS))')
methods="$methods,ar rows=16,dynatree rebuild"
if $dry; then
  device=(--device cpu --dtype float32)
  target_shape=(--hidden 640 --layers 6 --vocab 4200)
  draft_shape=(--hidden 256 --layers 2 --vocab 4200)
  sizes=(--n-prompts 1 --prompt-tokens 20 --new-tokens 12)
  file=$work/gpu_dry.json
else
  if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "error: torch sees no CUDA device; bash tools/gpu_check.sh --dry runs without one" >&2
    exit 2
  fi
  name=$(python -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "_"))')
  device=(--device cuda --dtype float16)
  target_shape=(--hidden 2560 --layers 32 --vocab 50304)
  draft_shape=(--hidden 512 --layers 6 --vocab 50304)
  sizes=(--n-prompts 4 --prompt-tokens 150 --new-tokens 128)
  file=results/gpu_${name#nvidia_}.json
  methods="$methods,ar eager,dynatree eager"
fi

failed=false
step() { printf '\n== %s (%ss so far)\n' "$1" "$SECONDS"; }
check() { "$@" || { echo "FAILED with status $?" >&2; failed=true; }; }  # and go on measuring

step "tests marked cuda"
check python -m pytest -q -n 0 -W default -m cuda tests

step "exactness in float32, embedded pair"
check python bench.py "${device[0]}" "${device[1]}" --dtype float32 "${sizes[@]}" --methods "$methods" \
  --target models/tiny/target --draft models/tiny/draft \
  --columns throughput,speedup,exact --output "$work/exact.json"

if [ ${#models[@]} -eq 0 ]; then
  step "enlarging the embedded pair"
  python tools/enlarge.py models/tiny/target "$enlarged/target" "${target_shape[@]}"
  python tools/enlarge.py models/tiny/draft "$enlarged/draft" "${draft_shape[@]}"
  models=(--target "$enlarged/target" --draft "$enlarged/draft")
fi

step "step times"
check python bench.py --table steps "${device[@]}" "${models[@]}" --output "$work/steps.json"

step "memory"
check python bench.py --table memory "${device[@]}" "${models[@]}" "${sizes[@]}" \
  --methods ar,dynatree --output "$work/memory.json"

step "every method"
check python bench.py "${device[@]}" "${models[@]}" "${sizes[@]}" --methods "$methods" \
  --output "$work/every.json" >"$work/every.txt"

step "results"
if [ -e "$work/every.json" ]; then  # all of it, or what was measured before something failed
  mv "$work/every.json" "$file"
  python bench.py --show "$file" \
    --columns throughput,speedup,predicted,tokens_per_iter,draft,verify,other,exact
fi
if $failed; then
  echo "error: at least one step failed, see above" >&2
  exit 1
fi
