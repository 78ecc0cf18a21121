"""The start-up file of Python when this folder is on PYTHONPATH: it pretends a CUDA device.

It ends the process by SystemExit, because Python prints any other exception of this file and goes
on.
"""

import sys

import torch
from pretend_cuda import device

if torch.version.cuda or torch.version.hip:
    print("skipped: this torch has CUDA of its own, none can be pretended", file=sys.stderr)
    raise SystemExit(0)
try:
    device.install()
except Exception as error:
    raise SystemExit(f"error: no CUDA device can be pretended: {error}") from error
