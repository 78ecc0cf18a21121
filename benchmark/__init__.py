"""What bench.py measures with and shows its measurements by.

tables      tables: their datasets, sizes, rows and columns
presets     DynaTree's own tables, and what they print; presets_others: the other papers'
rows        a table's rows read, and made into runs
options     bench.py's options: read, checked, and made into a table to measure
machine     what a figure depends on besides the options
prompts     our own prompts, WikiText-2, PG-19, files
pg19        PG-19's books, fetched
step_times  what one forward costs by its rows, the bandwidth floor, predicted times
counts      passes, depths and matches, counted from a generation's steps
turns       which text is written when, and which there are not yet
sharing     prompts shared out over the processes of torchrun: how they begin and end
shard       what one of them has of the work, and how rank 0 hears of the others
memory      peak memory, in a process of its own
peers       transformers on the same weights, for comparison rows
results     results files: what was measured on what, and one record for every prompt
columns     what each column says of a row
report      what is shown of results: tables, captions, notes
documents   the figures that README.md and docs/results.md show, made of results files
plot        results files as figures: which; plot_canvas, _bars, _lines and _sweeps draw them
"""
