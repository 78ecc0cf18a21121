#!/usr/bin/env bash
# Everything about the CUDA code that only a GPU can tell, in one command, without a network:
#
#   bash tools/gpu_check.sh                # the embedded pair, in the shapes of Pythia-2.8B and 70M
#   bash tools/gpu_check.sh TARGET DRAFT   # two checkpoint folders instead
#   bash tools/gpu_check.sh --seconds 300 --keep FOLDER
#   bash tools/gpu_check.sh --dry          # tiny shapes, on a pretended GPU if there is none
#
# The most telling steps come first. Each is a process of its own, so an error of the device ends no
# other step. A step that takes too long is interrupted, and what it measured stays. The end names
# the steps that failed, with status 1. The results are in a folder and, packed, in FOLDER.tar.gz.
# It needs the packages of requirements.txt and pytest. PYTHON names the Python to use (python3).
set -uo pipefail

fail() {
  echo "error: $1" >&2
  exit 2
}

python=(${PYTHON:-python3}) seconds=530 keep="" dry="" main="" models=()
large=("--hidden 2560 --layers 32 --vocab 50304" "--hidden 512 --layers 6 --vocab 50304")
text="--n-prompts 4 --prompt-tokens 150 --max-new-tokens 128"
rows="ar,dynatree,recycle,dynatree strict,recycle strict"
while (($#)); do
  case $1 in
    --dry) dry=--dry ;;
    --seconds) seconds=${2-} && shift ;;
    --keep) keep=${2-} && shift ;;
    -*) fail "$1 is no option; the options are --seconds N, --keep FOLDER and --dry" ;;
    *)
      [[ -f $1/config.json ]] || fail "$1 is no checkpoint folder: it has no config.json"
      models+=("$1")
      ;;
  esac
  shift
done
[[ -f tools/gpu_check.sh ]] || fail "run this in the project's folder: bash tools/gpu_check.sh"
[[ $seconds =~ ^[1-9][0-9]{0,5}$ ]] || fail "--seconds '$seconds' is not a whole number from 1 to 999999"
[[ ${#models[@]} == [02] ]] || fail "name two folders, TARGET and DRAFT, or none"

# Plugins of pytest that are installed by chance may warn, and a warning is an error here
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
has_gpu="import torch; raise SystemExit(not torch.cuda.is_available())"
has_cuda="import torch; raise SystemExit(not (torch.version.cuda or torch.version.hip))"
if [[ $dry ]] && ! "${python[@]}" -c "$has_gpu" 2>/dev/null; then
  "${python[@]}" -c "$has_cuda" 2>/dev/null &&
    fail "--dry: this torch is built for a GPU, so none can be pretended; use a CPU build of torch"
  python+=(tests/pretend_cuda)
fi
if [[ ! $dry ]] && ! "${python[@]}" -c "$has_gpu" 2>/dev/null; then
  "${python[@]}" tools/gpu_versions.py /dev/null >&2
  fail "torch sees no GPU: docs/cuda.md, Installing"
fi

pair=$(mktemp -d models/enlarged_XXXXXX) || exit 2
trap 'rm -r "$pair"' EXIT
if [[ $dry ]]; then
  keep=${keep:-$pair/results}
  large=("--hidden 640 --layers 6 --vocab 4200" "--hidden 256 --layers 2 --vocab 4200")
  main="--methods ar,auto --columns throughput,exact"
  text="--n-prompts 1 --prompt-tokens 20 --max-new-tokens 4 --dtype float32"
  rows="ar,dynatree,recycle strict"
fi
keep=${keep:-results/run_gpu_$(date +%Y%m%d-%H%M%S)}
keep=${keep%/}
mkdir -p -- "$keep" 2>/dev/null || fail "--keep '$keep' is no folder that can be made"
[[ -z $(ls -A -- "$keep") ]] || fail "--keep '$keep' is not empty; use a new folder"
wrong=() reserved=$((seconds / 25))  # for the report
exec 3>&1 4>&2 > >(exec tee -i "$keep/log.txt") 2>&1
log=$!
trap 'rm -r "$pair"; exec >&3 2>&4; wait "$log"' EXIT  # tee must write the rest
trap 'exit 130' INT TERM  # once the step has ended, which Ctrl-C reaches as well

# step NAME PERCENT ARGUMENT...: run Python with these arguments for at most PERCENT of the seconds,
# and no longer than the time that is left
step() {
  local limit=$((1 + seconds * $2 / 100)) left=$((seconds - reserved - SECONDS)) began=$SECONDS
  limit=$((limit < left ? limit : left))
  if ((limit < 1)); then
    wrong+=("$1: skipped, there was no time left")
    return 1
  fi
  printf '\n== %s (%d s at most, %d s left)\n' "$1" "$limit" "$left"
  timeout --foreground --signal=INT --kill-after 10 "$limit" "${python[@]}" "${@:3}"
  case $? in
    0) return 0 ;;
    124 | 137) wrong+=("$1: ended after $((SECONDS - began)) s") ;;  # or killed by the system
    *) wrong+=("$1: failed") ;;
  esac
  return 1
}

# tests NAME PERCENT WORDS: run the tests marked cuda whose names have these words
tests() {
  local file=$keep/tests_${1// /_}.txt failed
  step "tests of $1" "$2" -m pytest -v --tb=short -o addopts= -p no:cacheprovider -m cuda \
    -k "$3" tests/test_cuda.py > >(tee "$file") && return
  wait $!  # for tee
  failed=$(grep -m1 -E '^tests/[^ ]+ (FAILED|ERROR)' "$file" || grep '^tests/' "$file" | tail -1)
  failed=${failed%% *}  # of a crash, the test that was running
  [[ $failed ]] || return
  # An error of a kernel shows up at a later operation, unless each launch waits for its kernel
  CUDA_LAUNCH_BLOCKING=1 step "$failed again, alone, each launch waiting" 8 -m pytest --tb=long \
    -o addopts= -p no:cacheprovider "$failed"
}

# table NAME PERCENT OPTION...: run bench.py with these options
table() {
  step "table $1" "$2" bench.py --target "$target" --draft "$draft" $text \
    --output "$keep/$1.jsonl" "${@:3}"
}

shapes=(${models:+--target "${models[0]}" --draft "${models[1]}"} $dry)
step versions 5 tools/gpu_versions.py "$keep/versions.json"
"${python[@]}" bench.py --version >/dev/null || exit 2  # says which package is missing
command -v nvidia-smi >/dev/null && nvidia-smi --format=csv \
  --query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm
step "first pass" 10 tools/gpu_first_pass.py "${shapes[@]}" --output "$keep/first_pass.json"
step facts 20 tools/gpu_facts.py "${shapes[@]}" --only launches,passes,attention,products \
  --output "$keep/facts.json"
# Alone, because a profiler may slow what comes after it, and end with an error of its own
TEARDOWN_CUPTI=0 step profile 8 tools/gpu_facts.py "${shapes[@]}" --only profile \
  --output "$keep/profile.json"
CUBLASLT_WORKSPACE_SIZE=32768 step "products with a workspace of 32 MiB" 8 tools/gpu_facts.py \
  "${shapes[@]}" --only products --output "$keep/workspace.json"
tests "strict passes" 10 "strict${dry:+ and eager and not bfloat16}"
tests attention 5 "attention${dry:+ and 7-torch.bfloat16}"
tests graphs 15 "not strict and not attention${dry:+ and two_generations}"

target=${models[0]-$pair/target} draft=${models[1]-$pair/draft}
if ((${#models[@]} == 0)); then
  step "the target, enlarged" 10 tools/enlarge.py models/tiny/target "$target" ${large[0]} &&
    step "the draft, enlarged" 10 tools/enlarge.py models/tiny/draft "$draft" ${large[1]} ||
    target=models/tiny/target draft=models/tiny/draft  # so that ids are compared with ar's
fi
table pair 25 --methods "$rows" \
  --columns throughput,speedup,predicted,tokens_per_iter,draft,verify,other,exact
table main 50 $main
table memory 20 --table memory --methods ar,dynatree

printf '\n== report\n'
timeout --signal=INT 30 "${python[@]}" tools/gpu_report.py "$keep" || wrong+=("report: failed")
((${#wrong[@]} == 0)) || printf 'error: %s\n' "${wrong[@]}"
exec >&3 2>&4
wait "$log"  # so that the log is whole
tar --create --gzip --file "$keep.tar.gz" --directory "$keep" .
[[ $keep == "$pair"* ]] || echo "all results are in $keep and $keep.tar.gz"
exit $((${#wrong[@]} > 0))
