"""What a person types and sees.

main      the options of dynatree.py, one generation, and what is said of it
options   what the user asked for, checked: options, settings, prompt
models    opening a pair: device, dtype, checkpoints; a request to continue a prompt
tokens    text to ids and back: tokenizers, prompts, text that is streamed
terminal  drawn trees, the help of every setting
metrics   one generation in numbers
compare   --compare: a method's run beside ar's, and what explains a difference
errors    one line for every mistake, the exit status, Ctrl-C
trace     what decided every tree and what became of it, as data (--trace)
page      the same as a page to look at (--page), from the files of page/
start     the first import of every program: before torch, and if a package lacks
"""
