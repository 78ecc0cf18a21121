"""The benchmark of all methods: python -m dynatree_lab.benchmark, or dynatree-bench.

measure     the measurement loop, and the program
cases       tables of this project and of the papers (tables.toml), as rows on a dataset at a size
plan        the program's options, and the cases, models and prompts that they choose
prompts     prompts from prompts.jsonl, WikiText-2, PG-19 or a file
enlarge     embedded pair at the cost of larger models, made once
machine     description of the machine and the versions
hf          transformers on the same weights, for comparison rows
memory      peak memory, measured in a new process
results     results files: a head, and one line for every text
replaying   recorded texts of a table's prompts, and tables over them without a target
tuning      search of table tune, and the end of its report: settings for a pair
report      DataFrame of the texts, tables with their columns, captions and notes
figures     figures of a results file: bars, calibration, and the best settings by rows
regimes     the table of README.md: speed-ups where rows cost little and much
plot        command line that draws results files as PNG figures
"""
