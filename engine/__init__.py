"""What loads models and makes them fast; it knows no tree.

checkpoint    config.json and safetensors: checked, loaded
hub           finding a checkpoint: a folder, or fetched from the hub
fused         the layers of a loaded model, replaced by fast ones; nothing else departs from it
kernels       the same in Triton, on CUDA where it is asked for
products      products with matrices, packed for passes of a few rows
passes        the mask as numbers, and passes that are padded
cuda_graphs   passes of a few fixed shapes: captured, replayed
scores        what a pass says of the token after each row
strict        attention whose bits depend on position and keys alone
caches        the memory of caches, lent again with what was captured over it
memory        whether something fits, asked before it is taken
sampling      temperature, top-p, drawing without replacement
streaming     a cache of constant size for text of any length
shares        what one of several ranks has of a model, and how parts become whole
stopwatch     milliseconds of an iteration by part
settings      what a method's settings may be
foreign       files that somebody else wrote: read as what they ought to be, or refused
files         files of our own: written whole, by one process at a time
"""
