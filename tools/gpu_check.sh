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

fail() {
  echo "error: $1" >&2
  exit 2
}

python=${PYTHON:-python3} seconds=530 keep="" dry="" models=()
large=("--hidden 2560 --layers 32 --vocab 50304" "--hidden 512 --layers 6 --vocab 50304")
text="--n-prompts 4 --prompt-tokens 150 --new-tokens 128"
while (($#)); do
  case $1 in
    --dry) dry=--dry ;;
    --seconds) seconds=${2-} && shift ;;
    --keep) keep=${2-} && shift ;;
    -*) fail "$1: there are --seconds N, --keep FOLDER and --dry" ;;
    *)
      [[ -f $1/config.json ]] || fail "$1 is no checkpoint folder: it has no config.json"
      models+=("$1")
      ;;
  esac
  shift
done
[[ -f tools/gpu_check.sh ]] || fail "this runs in the project's folder: bash tools/gpu_check.sh"
[[ $seconds =~ ^[1-9][0-9]{0,5}$ ]] || fail "--seconds '$seconds' is no number from 1 on"
[[ ${#models[@]} == [02] ]] || fail "there are two folders, TARGET and DRAFT, or none"
"$python" bench.py --version >/dev/null || exit 2  # says what is not installed
has_gpu=$("$python" -c "import torch; print(torch.cuda.is_available())") || exit 2
"$python" -c "import pytest" 2>/dev/null || fail "no pytest: pip install -r requirements-dev.txt"
[[ $has_gpu == True || $dry ]] || fail "torch sees no GPU: docs/gpu.md, Installing"

pair=$(mktemp -d models/enlarged_XXXXXX) || exit 2
trap 'rm -r "$pair"' EXIT
if [[ $dry ]]; then
  keep=${keep:-$pair}
  large=("--hidden 640 --layers 6 --vocab 4200" "--hidden 256 --layers 2 --vocab 4200")
  text="--n-prompts 1 --prompt-tokens 20 --new-tokens 12"
fi
keep=${keep:-results/run_gpu_$(date +%Y%m%d-%H%M%S)}
mkdir -p -- "$keep" 2>/dev/null || fail "--keep '$keep' is no folder that can be made"
target=${models[0]-$pair/target} draft=${models[1]-$pair/draft} wrong=()
exec > >(exec tee -i "$keep/log.txt") 2>&1
trap 'rm -r "$pair"; exec >&- 2>&-; wait $!' EXIT  # for what tee has still to say
trap 'exit 130' INT TERM  # once the step has ended, which Ctrl-C reaches as well

step() {  # NAME PERCENT COMMAND...: for so much of the seconds at most, and of what is left
  local limit=$((1 + seconds * $2 / 100)) left=$((seconds - SECONDS))
  limit=$((limit < left ? limit : left))
  if ((limit < 1)); then
    wrong+=("$1: skipped, there was no time left")
    return
  fi
  printf '\n== %s (%d s at most, %d s left)\n' "$1" "$limit" "$left"
  timeout --foreground --kill-after 10 "$limit" "$python" "${@:3}"
  case $? in
    0) ;;
    124 | 137) wrong+=("$1: ended after $limit s") ;;
    *) wrong+=("$1: failed") ;;
  esac
}

table() {  # NAME PERCENT OPTIONS...: of bench.py
  step "table $1" "$2" bench.py --target "$target" --draft "$draft" $text \
    --output "$keep/$1.jsonl" "${@:3}"
}

command -v nvidia-smi >/dev/null && nvidia-smi --format=csv \
  --query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm
step "tests marked cuda" 25 -m pytest -q -o addopts= -p no:cacheprovider -m cuda \
  ${dry:+-k two_generations} tests/test_cuda.py
if ((${#models[@]} == 0)); then
  step "the target, enlarged" 10 tools/enlarge.py models/tiny/target "$target" ${large[0]}
  step "the draft, enlarged" 10 tools/enlarge.py models/tiny/draft "$draft" ${large[1]}
fi
table pair 20 --methods ar,dynatree \
  --columns throughput,speedup,predicted,tokens_per_iter,draft,verify,other,exact
table strict 15 --methods "dynatree strict,recycle strict"
if [[ $has_gpu == True ]]; then
  step facts 25 tools/gpu_facts.py --target "$target" --draft "$draft" \
    --output "$keep/facts.json" $dry
  table eager 15 --methods ar,dynatree --no-graphs
fi
table main 50
table memory 20 --table memory --methods ar,dynatree

[[ $keep == "$pair" ]] || echo "what was measured is in $keep"
((${#wrong[@]} == 0)) || printf 'error: %s\n' "${wrong[@]}"
exit $((${#wrong[@]} > 0))
