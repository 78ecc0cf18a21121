"""Scripts beside the project.

enlarge        a checkpoint of a larger shape that computes what a small one does
gpu_check.sh   everything that only a GPU can tell, in one command
"""
