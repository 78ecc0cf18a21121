"""What a person types and sees.

main      the options of dynatree.py, one generation, and what is printed of it
options   what the user asked for, checked: options, settings, prompt
models    target and draft: device, dtype, checkpoints; a request to continue a prompt
tokens    text to ids and back: tokenizers, prompts, text that is streamed
terminal  drawn trees, the help of every setting
metrics   one generation in numbers
compare   --compare: a method's run beside ar's, and what explains a difference
errors    one line for every mistake of the user's, the exit status, Ctrl-C
trace     the gates that decided each tree and what was accepted, as data (--trace)
files     files written whole, and kept from a second writer
page      the same data as a page to look at (--page), from the files of page/
start     how every program starts: before torch is imported, or with a package missing
"""
