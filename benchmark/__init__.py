"""What bench.py, which measures, needs beside it: tables, results files, reports, other figures.

cases       tables.toml read: our own tables and the papers', as rows on a dataset at a size
options     bench.py's options, and those that a results file keeps
opening     a table opened: options checked, models loaded, prompts cut
enlarged    the embedded pair at the cost of Pythia's smaller models, made once
machine     what a figure depends on besides the options
prompts     our own (prompts.jsonl), WikiText-2, PG-19, files
pg19        PG-19's books, fetched
step_times  what one pass costs by its rows, the bandwidth floor, predicted times
counts      passes, depths and matches, counted from a generation's steps; predicted times
memory      peak memory, in a process of its own
hf          transformers on the same weights, for comparison rows
results     results files: a line for what is measured, and one for every text
columns     what each column says of a case
report      what is shown of results: the frame of texts, tables, captions, notes
plot        results files as PNG figures
figures     which figures a results file gives, and how they are drawn
"""
