"""Scripts beside the project.

distil        a draft for a target, trained on text
enlarge       a checkpoint of a larger shape that computes what a small one does
folders       of both: where they write, all of it or nothing
gpu_check.sh  everything that only a GPU can tell, in one command of a known length
gpu_facts     of that, what bench.py cannot tell
"""
