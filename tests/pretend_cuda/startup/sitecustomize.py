"""What Python runs first where this folder is on PYTHONPATH: pretend a CUDA device, or say why not.

It ends the process by SystemExit: what else is raised here is printed, and all goes on without.
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
