"""Counts from the steps of a text: matches by probability.

count_calibration(steps)["top1_match"]
"""

import math
from collections.abc import Sequence

from dynatree_lab.cli.metrics import matches
from dynatree_lab.engine.generate import Step
from dynatree_lab.methods.rules import are_retrieved

N_BINS = 20  # of probabilities from 0 to 1


def count_calibration(steps: Sequence[Step]) -> dict[str, list[int]]:
    """Return the number of drafted nodes, and of those that are the target's best token after their
    parent, in N_BINS bins of their probability given the parent.

    This is the probability that the method uses: the draft's own, after temperature and top-p if
    candidates are drawn, or a calibrated one.
    """
    drafted = [0] * N_BINS
    matching = [0] * N_BINS
    for step in steps[1:]:
        tree, is_retrieved = step.tree, are_retrieved(step.tree)
        is_match = [False, *matches(step)]  # the root is no candidate
        for row in range(1, len(tree)):
            if not is_retrieved[row]:
                parent_logprob = tree.path_logprobs[tree.parents[row]]
                probability = math.exp(tree.path_logprobs[row] - parent_logprob)
                bin = min(int(probability * N_BINS), N_BINS - 1)
                drafted[bin] += 1
                matching[bin] += is_match[row]
    return {"drafted": drafted, "top1_match": matching}
