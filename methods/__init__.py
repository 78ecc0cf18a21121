"""One file for each method beside dynatree, which is in draft_tree.py."""
