"""What makes the five files fast, and any checkpoint theirs: the same model and loop, from outside.

model         GPTNeoX with caches that are kept, and passes that are padded or captured
way           how a text is written: method, settings, sampling, window, strict
decoding      the loop with what stands between its steps: memory, windows, strict texts, graphs
checkpoint    a checkpoint's tensors, each read when it is used
hub           finding a checkpoint: a folder, or fetched from the hub
fused         the layers of a loaded model, replaced by fast ones
products      products with matrices, packed for passes of a few rows
passes        the mask as numbers, and passes that are padded
cuda_graphs   passes of a few fixed shapes: captured, replayed
scores        what a pass says of the token after each row
strict        attention whose bits depend on position and keys alone
caches        the memory of caches, lent again with what was captured over it
memory        whether something fits, asked before it is taken
sampling      the sampler's draws, where the model is
streaming     a cache of constant size for text of any length
shares        what one of several ranks has of a model, and how parts become whole
foreign       files that somebody else wrote: read as what they ought to be, or refused
files         files of our own: written whole, by one process at a time
"""
