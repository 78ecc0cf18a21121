"""The command line.

main      one generation: options, streamed text, summary, reports
options   options of methods, sampling and models; the prompt
models    device, dtype and checkpoints of target and draft
request   a request to continue a prompt: its steps and its text
result    a text with its steps, metrics and page; a session of several texts
tokens    tokenizers, prompts, streamed text, stop texts
prompts   the prompts of a file (--prompts)
terminal  drawn trees, the list of methods and settings
metrics   the numbers of one generation
compare   a generation compared with ar (--compare)
errors    the parser, one line per user mistake, the exit status
trace     the gates that decided each tree, and what was accepted, as data (--trace)
page      the same data as an HTML page (--html), from the files in page/
folders   new checkpoints, written whole or not at all
start     the start of every program, before torch is imported
"""
