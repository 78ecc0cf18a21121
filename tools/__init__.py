"""Scripts beside the project.

distil             a draft for a target, trained on text and on what the target writes
enlarge            a checkpoint of a larger shape that computes what a small one does
profile_iteration  what an iteration makes a device do, kernel by kernel
calibrate          the settings of sequoia for a pair and a machine
gpu_check.sh       everything that only a GPU can tell, in one command
folders            of distil and enlarge: where they write, all of it or nothing
"""
