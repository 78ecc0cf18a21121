"""A faster model than the core's, and a loader of published checkpoints.

A pass goes one way, from the loop of dynatree.generate to attention:

    FastRun.forward           generation/run.py: times, observers
    FastGPTNeoX.forward       model.py: one PassInputs of all arguments
    FastCache.run             cache.py: mask, padding, scores (cuda_graphs.py: fixed shapes)
    FusedTransformer.forward  layers.py
    FusedLayer.forward        layers.py
    Mask.attend               masks.py

The files, from a pass's arguments to its results, then what is around it:

passes        the options of passes, and the sizes of fixed shapes
inputs        the inputs of one pass
model         GPTNeoX with fused layers, and with caches that run its passes
cache         the KV cache of one generation: memory, passes, window, rebuilt commits
cuda_graphs   a cache with passes of a few fixed shapes, captured and replayed
layers        the fused layers
linear        linear layers over matrices packed for passes of a few rows
masks         the masks of a pass, from the host's bool mask to attention
strict        masks of batch-invariant passes: a row's bits depend only on position and keys
invariance    the number of rows from which on strict passes are batch-invariant, by trials
scores        the results of a pass that the host reads
checkpoint    finding, fetching, checking and loading a checkpoint
streamed      a target larger than memory: its layers are read again in each pass
eagle_head    checkpoints of EAGLE heads, and heads with fast passes
memory        checks of free memory before an allocation
tensor_parallel  one rank's shard of the target, and the sums that combine all shards
ranks         several processes of one command, and their collectives
"""
