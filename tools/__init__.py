"""Scripts for checkpoints and for GPUs.

distil        trains a draft model for a target on text
enlarge       makes a checkpoint of a larger shape that computes what a small one does
folders       writes the new folders of both, whole or not at all
gpu_check.sh  runs all tests and measurements that need a GPU, in one command
gpu_facts     measures on a GPU what bench.py does not
"""
