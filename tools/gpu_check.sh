#!/usr/bin/env bash
# Everything about the CUDA path that only a GPU can tell, in one command, without a network:
#
#   bash tools/gpu_check.sh                # the embedded pair, in the shapes of Pythia-2.8B and 70M
#   bash tools/gpu_check.sh TARGET DRAFT   # two checkpoint folders instead
#   bash tools/gpu_check.sh --seconds 300 --keep FOLDER
#   bash tools/gpu_check.sh --dry          # tiny shapes, the CPU if need be: does this run?
#
# The most telling steps come first. One that fails stops no other, one that takes too long is ended
# and what it measured stays, and the end names both, with status 1. PYTHON names the Python that
# takes all this (python3).
set -uo pipefail
shopt -s nullglob
unset CDPATH  # with it, cd may go elsewhere and say where

fail() {
  echo "error: $1" >&2
  exit 2
}

# What is asked for

python=${PYTHON:-python3} seconds=530 keep="" is_dry="" models=()
while (($#)); do
  case $1 in
    --dry) is_dry=yes ;;
    --seconds) seconds=${2-} && shift ;;
    --keep)
      mkdir -p -- "${2-}" 2>/dev/null || fail "--keep '${2-}' is no folder that can be made"
      keep=$(realpath -- "$2") && shift
      ;;
    -*) fail "$1: there are --seconds N, --keep FOLDER and --dry" ;;
    *)
      [[ -f $1/config.json ]] || fail "$1 is no checkpoint folder: it has no config.json"
      models+=("$(realpath -- "$1")")
      ;;
  esac
  shift
done
[[ $seconds =~ ^[1-9][0-9]{0,5}$ ]] || fail "--seconds '$seconds' is no number from 1 on"
[[ ${#models[@]} == [02] ]] || fail "there are two folders, TARGET and DRAFT, or none"
command -v "$python" >/dev/null || fail "there is no $python on the PATH; PYTHON names another"
[[ $python != */* ]] || python=$(realpath -s -- "$python")
cd -- "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")/.." || exit 2
"$python" -c "import pytest" 2>/dev/null || fail "no pytest: pip install -r requirements-dev.txt"
device=$("$python" - <<'END'
import cli.start  # which has a line for a package that lacks
import re, torch, bench
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
print(re.sub("[^a-z0-9]+", "_", gpu.lower()).removeprefix("nvidia_"))
END
) || exit 2
[[ $device != cpu || $is_dry ]] || fail "torch sees no GPU: docs/gpu.md, Installing"

folder=results/run_gpu_$(date +%Y%m%d-%H%M%S)
shapes=("--hidden 2560 --layers 32 --vocab 50304" "--hidden 512 --layers 6 --vocab 50304")
text="--n-prompts 4 --prompt-tokens 150 --new-tokens 128" is_less=""
if [[ $is_dry ]]; then
  folder=$(mktemp -d)
  shapes=("--hidden 640 --layers 6 --vocab 4200" "--hidden 256 --layers 2 --vocab 4200")
  text="--n-prompts 1 --prompt-tokens 20 --new-tokens 12" is_less=--dry
fi
mkdir -p "$folder/pair" || exit 2
pair=(--target "${models[0]-$folder/pair/target}" --draft "${models[1]-$folder/pair/draft}")

# How a step is taken, and what is left at the end

wrong=() child=""

step() {  # NAME PERCENT COMMAND...: for so much of the seconds at most, and of what is left
  local limit=$((1 + seconds * $2 / 100)) left=$((seconds - SECONDS))
  limit=$((limit < left ? limit : left))
  if ((limit < 1)); then
    wrong+=("$1: skipped, there was no time left")
    return
  fi
  printf '\n== %s (%d s at most, %d s left)\n' "$1" "$limit" "$left"
  timeout --kill-after 10 "$limit" "$python" "${@:3}" &
  child=$!
  wait "$child"
  case $? in
    0) ;;
    124 | 137) wrong+=("$1: ended after $limit s") ;;
    *) wrong+=("$1: failed") ;;
  esac
  keep_files
}

table() {  # NAME PERCENT OPTIONS...: of bench.py
  step "table $1" "$2" bench.py "${pair[@]}" $text --output "$folder/$1.json" "${@:3}"
}

keep_files() {
  [[ -z $keep ]] || cp "$folder"/*.{json,txt} "$keep"
}

finish() {
  local status=$?
  exec >&3 2>&4
  wait "$log"
  keep_files
  if [[ $is_dry ]]; then
    rm -r "$folder"
    return
  fi
  echo "what was measured is in $folder"
  if ((status == 0)); then
    rm -r "$folder/pair"
  else
    echo "the pair stays, 6 GB, for bench.py --resume; to remove it: rm -r $folder/pair"
  fi
}

exec 3>&1 4>&2 > >(exec tee -i "$folder/log.txt") 2>&1
log=$!
trap finish EXIT
trap 'kill "$child" 2>/dev/null; wait "$child"; exit 130' INT TERM

# The steps

command -v nvidia-smi >/dev/null && nvidia-smi --format=csv \
  --query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm
step "tests marked cuda" 25 -m pytest -q -o addopts= -p no:cacheprovider -m cuda \
  ${is_less:+-k two_generations} tests/test_cuda.py
if ((${#models[@]} == 0)); then
  step "the target, enlarged" 10 tools/enlarge.py models/tiny/target "${pair[1]}" ${shapes[0]}
  step "the draft, enlarged" 10 tools/enlarge.py models/tiny/draft "${pair[3]}" ${shapes[1]}
fi
table pair 20 --methods "ar,ar rows=2,dynatree" \
  --columns throughput,speedup,predicted,tokens_per_iter,draft,verify,other,exact
step facts 25 tools/gpu_facts.py "${pair[@]}" --output "$folder/facts.json" $is_less
table strict 15 --methods "dynatree strict,recycle strict" --columns throughput,speedup,verify,exact
[[ $device == cpu ]] || table eager 15 --methods ar,dynatree --no-graphs --columns throughput,verify
table main 50
table memory 20 --table memory --methods ar,dynatree

if [[ -f $folder/main.json && ! $is_dry ]]; then
  n=1 file=results/gpu_$device.json
  while [[ -e $file || -L $file ]]; do
    file=results/gpu_${device}_$((++n)).json
  done
  ln "$folder/main.json" "$file"
  echo "the main table is also $file"
fi
for what in "${wrong[@]}"; do
  echo "error: $what"
done
exit $((${#wrong[@]} > 0))
