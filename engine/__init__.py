"""A faster model and loop than the core's, and the loader of published checkpoints.

model         GPTNeoX with fused layers, and with caches that own their passes
layers        the fused layers
linear        linear layers over matrices packed for passes of a few rows
cache         the KV cache of one generation: memory, passes, window, rebuilt commits
passes        what a generation asks of its passes; the passes over one cache
cuda_graphs   passes of a few fixed shapes, captured and replayed
strict        batch-invariant passes: attention whose bits depend on position and keys alone
scores        what the host reads of a pass's logits
generate      the core's loop with windows, strict passes, graphs and timing
generation_config  how a text is generated: method, settings, sampling, window
checkpoint    finding, fetching, checking and loading a checkpoint
memory        checks of free memory before something is allocated
tensor_parallel  one rank's shard of a model, and how results are combined
ranks         one command in several processes
driver        a target that several ranks compute: rank 0 drives, the workers repeat its calls
"""
