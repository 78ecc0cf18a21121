"""The benchmark of all methods: python -m dynatree_lab.benchmark [options]"""

from dynatree_lab.cli.start import run_bench

run_bench()
