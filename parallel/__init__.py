"""One target in several processes, as torchrun starts them.

ranks   the processes of one command: what they tell each other, and how they end
target  a target of which each has a share; rank 0 tells, the others follow
"""
