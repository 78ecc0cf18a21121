"""A CUDA device that is only pretended, for a torch without CUDA, with real values.

    python tests/pretend_cuda -m pytest -m cuda        # what a GPU would be tested by, and more
    python tests/pretend_cuda dynatree.py --device cuda --prompt "The ship sailed at dawn"
    python tests/pretend_cuda -m pretend_cuda.counts   # what an iteration asks of the device

`python tests/pretend_cuda ARGUMENTS` is `python ARGUMENTS` in a process, and with child processes,
that have one CUDA device; under torchrun each rank has one of its own. A tensor there is a wrapper
around a CPU tensor, and every operation on one is checked, counted and carried out on what is
inside. What raises on a GPU raises:

mixing    of host and device tensors, but for scalars; also an index on the host, for which torch
          would copy it
capture   carries out nothing; what waits in one, copies, draws, lacks memory or has not run before
          on such types and shapes raises
replay    runs the operations that were captured, on the same memory, so a Python value that went
          into one stays as it was; memory that was freed since is an error
memory    what nobody has written yet is poisoned, and the device has a limit
pinned    a copy counts as not yet made until the host has waited for it: memory that the host
          overwrites before is an error, and what it reads before is poison
ranks     nccl's collectives are captured and replayed, carried out by gloo; where ranks would wait
          for each other for ever, or one uses the device of another, an error is raised

It cannot see kernels and how they round, how nccl adds up, races between streams, alignment, speed,
or on which device a Generator draws. Of torch.cuda there is what this project calls.

timeline   the order of what the host asked for, how much of it was waited for, counts by line
tensors    the tensor and the device's memory
copies     between host and device, and pinned memory
graphs     capture and replay
dispatch   every operation of torch, on its way
nccl       what ranks compute together
runtime    stand-ins for torch.cuda's functions, streams and events, under their own names
attention  which attention a GPU would choose
device     puts all of that into torch
plugin     pytest's part
counts     launches, waits and copies of an iteration
startup/   what Python runs first in every process that pretends
test_*     planted mistakes; every method, tables and counts on the pretended device
"""
