"""One text: the core's loop with windows, strict passes, graphs and timing, in the order of a text.

config    all options of a generation: method, settings, sampling, window
generate  the loop, and what it is given
run       a model in one text: its cache, and who observes its passes
kept      a cache that is kept from one text to the next
compose   assembly of a method's parts
record    how a rule decided each tree, for the page
process   logits processors of the caller
replayed  what a generation over recorded texts refuses
step      a step of `generate`, and what keeps its times, scores and log-probabilities
"""
