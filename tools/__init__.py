"""Checks of the CUDA code on a GPU.

gpu_check.sh    checks and times the CUDA code, in one command
gpu_first_pass  passes of models with random weights, with CUDA graphs and without
"""
