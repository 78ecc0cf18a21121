"""What a person types and sees.

main        the options of dynatree.py, one generation, and what is said of it
options     what the user asked for, checked: options, settings, prompt
models      opening a pair: device, dtype, checkpoints, tokenizers; a request to continue a prompt
terminal    streamed text, drawn trees, the help of every setting
metrics     one generation in numbers
compare     --compare: a method's run beside ar's, and what explains a difference
ranks       a command line under torchrun
errors      one line for every mistake, and the exit status
trace       what decided every tree and what became of it, as data (--trace)
page        the same as a page to look at (--page), from the files of page/
interrupts  what Ctrl-C does, and when
start       the same, and what an import fails with, before anything slow is imported
"""
