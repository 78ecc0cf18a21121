#!/usr/bin/env bash
# Everything about the CUDA path that only a GPU can tell, in one command, without a network:
#
#   bash tools/gpu_check.sh                # the embedded pair, in the shapes of Pythia-2.8B and 70M
#   bash tools/gpu_check.sh TARGET DRAFT   # two checkpoint folders instead
#   bash tools/gpu_check.sh --dry          # tiny shapes, the CPU if need be: does this run?
#
# tools/gpu_check.py says what it does and leaves; this finds a Python for it, PYTHON or python3.
set -euo pipefail
unset CDPATH  # with it, cd may go elsewhere and say where
python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null; then
  echo "error: there is no $python on the PATH; PYTHON names one with what requirements-dev.txt lists" >&2
  exit 2
fi
here=$(cd -- "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")" && pwd)
exec "$python" "$here/gpu_check.py" "$@"
