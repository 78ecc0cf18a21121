"""Scripts beside the project.

distil        a draft for a target, trained on text and on what the target writes
enlarge       a checkpoint of a larger shape that computes what a small one does
gpu_check.sh  everything that only a GPU can tell, in one command of a known length
gpu_check     its parts in order, each in its share of the time
gpu_facts     what those parts ask of the device
folders       of distil and enlarge: where they write, all of it or nothing
"""
