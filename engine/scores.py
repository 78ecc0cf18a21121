"""What a pass says of the token after each of its rows: logits there, and the best of them here.

The logits stay where the model is. What the host needs of them is little: the best id of each row,
whether it is a number at all, and a few candidates. On a CPU that is computed when it is asked for;
on CUDA a pass ranks its logits itself (engine/cuda_graphs.py), and all of it comes by one read.

    scores = Scores(logits)
    highest, ids = scores.best()  # [n] each
    logprobs, candidates = scores.likeliest(3)  # [n, 3] each

Shapes: n rows, V vocabulary, k candidates per row.
"""

import torch
from torch import Tensor


class Scores:
    """Of n rows; slices are of their rows."""

    def __init__(self, logits: Tensor, ranked: Tensor | None = None):
        """logits: float32 [n, V]; on CUDA the next pass over the same cache may overwrite them.

        ranked: what `rank` gave for them, with as many candidates as will be asked for.
        """
        self.logits = logits
        self.ranked = ranked  # [n, 2 + 2 k] on the device, then on the host
        self.found: tuple[Tensor, Tensor] | None = None  # what `best` gave

    def __getitem__(self, rows: slice) -> "Scores":
        return Scores(self.logits[rows], None if self.ranked is None else self.ranked[rows])

    def best(self) -> tuple[Tensor, Tensor]:
        """Each row's highest logit [n] and its id [n] int64, of equals the first; on the host.

        A row that holds inf or nan has it here.
        """
        if self.found is None:
            self.found = self.find_best()
        return self.found

    def find_best(self) -> tuple[Tensor, Tensor]:
        if self.logits.device.type == "cpu":
            ids = self.logits.numpy().argmax(axis=1)  # ten times as fast as torch's (measured)
            return self.logits.amax(dim=1), torch.from_numpy(ids)
        ranked = self.read(0)
        return ranked[:, 0], ranked[:, 1].long()

    def likeliest(self, k: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities [n, k] and int64 ids [n, k], the best first; on the host.

        k is no more than the ids there are.
        """
        k = min(k, self.logits.shape[1])
        if self.logits.device.type == "cpu":
            return torch.log_softmax(self.logits, dim=-1).topk(k)
        logprobs, ids = self.read(k)[:, 2:].chunk(2, dim=1)
        return logprobs[:, :k], ids[:, :k].long()

    def likeliest_ids(self, k: int) -> Tensor:
        """The ids alone [n, k]."""
        k = min(k, self.logits.shape[1])
        if self.logits.device.type == "cpu":
            return self.logits.topk(k).indices
        return self.likeliest(k)[1]

    def read(self, k: int) -> Tensor:
        """What was ranked, on the host, with k candidates or more."""
        if self.ranked is None or self.ranked.shape[1] < 2 + 2 * k:
            self.ranked = rank(self.logits, k)
        self.ranked = self.ranked.cpu()  # itself if it has been read
        return self.ranked


def rank(logits: Tensor, k: int) -> Tensor:
    """float32 [n, 2 + 2 k]: highest logit, its id, then k log-probabilities and their ids.

    Ids travel as float32, too, which is exact below 2^24.
    """
    highest, first = logits.max(dim=-1, keepdim=True)  # topk does not say which of equals it takes
    columns = [highest, first]
    if k:
        columns += torch.log_softmax(logits, dim=-1).topk(min(k, logits.shape[1]))
    return torch.cat(columns, dim=1)


def to_host(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of one shape, float32 and int64, on the host after one read; ids as above."""
    if values.device.type == "cpu":
        return values, ids
    both = torch.stack((values, ids.float())).cpu()
    return both[0], both[1].long()
