"""The parts of the benchmark around bench.py, which measures: tables, results files and reports.

cases       tables of this project and of the papers (tables.toml), as rows on a dataset at a size
options     command line of bench.py, and the options that a results file records
prepare     preparation of a run: options checked, models loaded, prompts cut
enlarged    embedded pair at the cost of Pythia's smaller models, made once
machine     description of the machine and the versions
prompts     prompts from prompts.jsonl, WikiText-2, PG-19 or a file
pg19        download of PG-19's books
step_times  times of single passes by number of rows, the bandwidth floor, predicted times
counts      counts of passes, depths and matches in the steps of a text; its predicted time
memory      peak memory, measured in a new process
hf          transformers on the same weights, for comparison rows
results     results files: a head, and one line for every text
columns     columns of the tables
report      DataFrame of the texts, tables, captions and notes
blocks      count of the non-empty blocks of tree masks
plot        command line that draws results files as PNG figures
figures     figures of a results file
"""
