#!/usr/bin/env bash
# Checks and times the CUDA code on a GPU, without a network. Needs pytest.
#
#   bash tools/gpu_check.sh                # the embedded pair, in the shapes of Pythia-2.8B and 70M
#   bash tools/gpu_check.sh TARGET DRAFT   # two checkpoint folders instead
#   bash tools/gpu_check.sh --dry          # tiny shapes on a pretended device
#
# Each step is a process of its own with at most 10 minutes, and the next one starts even if it
# fails. PYTHON names the Python to use (python3), OUT the folder of the results (results).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
python=("${PYTHON:-python3}") out=${OUT:-results} failed=0
models=(--pair enlarged_gpu) dry="" test=""
sizes="--n-prompts 4 --prompt-tokens 150 --max-new-tokens 128" methods=""
if [[ ${1:-} == --dry ]]; then
  python+=(tests/lab/pretend_cuda) models=(--pair embedded) dry=--dry
  sizes="--n-prompts 1 --prompt-tokens 12 --max-new-tokens 4 --columns exact"
  methods="--methods ar,auto" test=odd_width
elif [[ $# == 2 ]]; then
  models=(--target "$1" --draft "$2")
fi
device=$("${python[@]}" -c "import torch; print(torch.cuda.get_device_name())") || exit 2
name=gpu_${device//[^A-Za-z0-9]/_}
[[ -e $out/${name}_log.txt ]] && echo "error: $out/${name}_log.txt exists; move it" >&2 && exit 2

step() {
  echo "== $*"
  timeout --signal=INT 600 "${python[@]}" "$@" || { failed=1 && echo "error: failed: $*"; }
}
check() {
  step -m torch.utils.collect_env
  step -m tools.gpu_first_pass $dry
  step -m pytest -p no:xdist -m cuda -k "$test" tests/lab/test_cuda.py
  local table=(-m dynatree_lab.benchmark "${models[@]}" $sizes --output "$out/$name")
  step "${table[@]}_main.jsonl" $methods
  step "${table[@]}_strict.jsonl" --methods "ar,dynatree,ar strict,dynatree strict"
  return $failed
}
check 2>&1 | tee "$out/${name}_log.txt"
status=${PIPESTATUS[0]}
tar --create --gzip --file "$out/$name.tar.gz" --directory "$out" $(cd "$out" && ls "$name"_*)
exit "$status"
