"""Counts from the steps of a text: accepted paths by depth, and matches by probability.

count_depths(steps)["accepted"]  # accepted paths that reach depth 1, 2, ...
count_calibration(steps)["top1_match"]
"""

import math
from collections.abc import Sequence

from dynatree_lab.cli.metrics import matches
from dynatree_lab.engine.generate import Step
from dynatree_lab.methods.rules import are_retrieved

N_BINS = 20  # of probabilities from 0 to 1


def count_depths(steps: Sequence[Step]) -> dict[str, list[int]]:
    """Return three counts for each depth 1, 2, ...

    drafted   trees that reach the depth
    tried     accepted paths that reach the depth before, and have a child at this one
    accepted  accepted paths that reach the depth
    """
    depths = [max(step.tree.depths) for step in steps[1:]]
    found = {name: [0] * max(depths, default=0) for name in ("drafted", "tried", "accepted")}
    for step, depth in zip(steps[1:], depths, strict=True):
        n_accepted = len(step.path) - 1
        has_child = step.path[-1] in step.tree.parents
        reached = {"drafted": depth, "tried": n_accepted + has_child, "accepted": n_accepted}
        for name, n in reached.items():
            for i in range(n):
                found[name][i] += 1
    return found


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
