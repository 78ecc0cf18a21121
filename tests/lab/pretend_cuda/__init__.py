"""A pretended CUDA device with real values, for a torch without CUDA.

    python tests/lab/pretend_cuda -m pytest -m cuda        # the tests for a GPU, and more
    python tests/lab/pretend_cuda -m dynatree_lab --device cuda --prompt "The ship sailed at dawn"

`python tests/lab/pretend_cuda ARGUMENTS` runs `python ARGUMENTS` in a process with one CUDA device.
Its child processes have one as well. A tensor of the device wraps a CPU tensor. Every operation on
it is checked and run on the CPU tensor. What raises an error on a GPU raises one here:

mixing    host and device tensors in one operation, except for host scalars; also an index on the
          host, which torch would copy
capture   computes nothing; an operation raises if it waits, copies, draws, or has not run before
          on such types and shapes
replay    runs the captured operations on the same memory, with the Python values of the capture;
          memory that was freed since is an error
memory    is poisoned until something is written to it
alignment attention takes only pointers and strides of whole 16 bytes
pinned    a copy is pending until the host waits for it: it is an error if the host writes to its
          memory before, and a read before gives poison
streams   an operation that may run while another stream still uses its memory is an error

It cannot check the kernels and their rounding, nccl, memory, speed, or on which device a Generator
draws. It has only the functions of torch.cuda that this project calls.

timeline   the order of the host's requests, and how many of them were waited for
tensors    the tensor
copies     copies between host and device, and pinned memory
graphs     capture and replay
dispatch   all operations of torch
streams    streams, and the check of what may run too early
runtime    stand-ins for torch.cuda's functions and events, under their own names
attention  the alignment that attention on a GPU requires
device     installation in torch
plugin     the pytest plugin
startup/   code that Python runs first in every process with the pretended device
test_*     every method, passes, and mistakes planted in the engine
"""
