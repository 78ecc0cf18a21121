"""What bench.py measures with and shows its measurements by.

tables      the papers' tables as lists of runs and columns
prompts     our own prompts, WikiText-2, files
step_times  what one forward costs by its rows, the bandwidth floor, predicted times
memory      peak memory, in a process of its own
peers       transformers on the same weights, for comparison rows
results     results files, and the tables made of them
plot        results files as figures
"""
