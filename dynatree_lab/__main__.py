"""The full program: python -m dynatree_lab --prompt TEXT [options]"""

from dynatree_lab.cli.start import run_lab

run_lab()
