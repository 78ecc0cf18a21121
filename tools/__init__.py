"""Scripts beside the project.

distil             a draft for a target, trained on text and on what the target writes
enlarge            a checkpoint of a larger shape that computes what a small one does
profile_iteration  what an iteration makes a device do, kernel by kernel
kernel_times       attention two ways, and the products of a layer, by rows
calibrate          the settings of sequoia for a pair and a machine
gpu_check.sh       everything that only a GPU can tell, in one command

Of distil: job (what it may be asked for), batch (many texts through the model), corpus (the text),
resume (the checkpoint of a run that was ended), outcome (figures, card). Of distil and enlarge:
folders (where they write).
"""
