"""The start-up file of Python when this folder is on PYTHONPATH: it pretends a CUDA device.

It ends the process by SystemExit, because Python prints any other exception of this file and goes
on.
"""

from pretend_cuda import device

try:
    device.install()
except Exception as error:
    raise SystemExit(f"error: no CUDA device can be pretended: {error}") from error
