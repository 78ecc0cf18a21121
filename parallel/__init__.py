"""One command in several processes, as torchrun starts them.

driver  rank 0's target, whose calls the workers repeat with their share of it
ranks   how processes find each other, what one tells all, what goes wrong on one
"""
