"""One command in several processes, as torchrun starts them.

ranks   what rank 0 decides and all hear; what goes wrong on one and ends all
"""
