"""Training of an EAGLE head (methods/eagle.py), for `dynatree_lab/training/distil.py --eagle`.

In a draft tree, the head runs on its own predictions. So it is trained on them, too, which EAGLE-3
calls the training-time test (Li et al. 2025). A training step runs the head N_PASSES times over its
sequences. Pass 0 gets the target's states, and each later pass the states that the pass before it
has predicted, like a level of a tree.

The loss of a pass is the cross-entropy from the target's distribution to the head's, plus
STATE_WEIGHT times the distance of the head's states from the target's (EAGLE, Li et al. 2024).

At most a third of a batch is text of the given files. The rest is text that the target writes
itself (own_text.py), because in use the head continues such text.

Shapes: B sequences of T tokens, H attention heads, D head size, V vocabulary.
"""

from argparse import Namespace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynatree_lab.cli.program import print_line
from dynatree_lab.engine.checkpoint import HEAD_TYPE, load_tensors
from dynatree_lab.engine.eagle_head import LAYER, target_digest
from dynatree_lab.training import own_text
from dynatree_lab.training.batches import Attend, autocast_for, draw_rows, run_layer, run_layers
from dynatree_lab.training.loop import Progress, train
from gpt_neox import GPTNeoX, Layer, read_json, rotary_table

RATE = 4e-3  # learning rate at hidden size 128; proportional to 1 / sqrt(hidden size)
# With two, levels 3 to 5 of a tree had almost the divergence of level 2 (0.72 and 0.71 nats after
# 100 steps, as measured for the embedded head)
N_PASSES = 2
STATE_WEIGHT = 0.1  # of the smooth L1 distance of states
N_SCALE = 8  # sequences from which TrainableHead takes its scale


class TrainableHead(nn.Module):
    """The trained part of a head: fc and one layer.

    At first, fc returns the embedding and ignores the state, and the layer is the target's first
    one. The inputs of fc are scaled to a root mean square of 1, because states may be much larger
    than embeddings (90 times in the embedded target), and the size of Adam's steps does not depend
    on that. Together they lowered the divergence of the embedded head after 100 steps from 2.0 to
    0.7 nats.
    """

    @torch.no_grad()
    def __init__(self, target: GPTNeoX, own_rows: Tensor):
        """own_rows: [n, T], text of the target. It is a buffer, so that a resumed run has it."""
        super().__init__()
        hidden = target.config.hidden_size
        self.register_buffer("own_rows", own_rows)
        rows = own_rows[:N_SCALE].to(target.device)
        rotary = rotary_table(target.config, rows.shape[1], target.device)
        inputs = target.gpt_neox.embed_in(rows), run_layers(target, rows, rotary)
        sizes = [x.float().square().mean().sqrt().expand(hidden) for x in inputs]
        self.register_buffer("scale", 1 / torch.cat(sizes))  # [2 * hidden]
        self.fc = nn.Linear(2 * hidden, hidden)
        self.fc.bias.zero_()
        self.fc.weight.copy_(torch.eye(hidden, 2 * hidden) / self.scale.cpu())
        self.layer = Layer(target.config)
        self.layer.load_state_dict(target.gpt_neox.layers[0].state_dict())

    def forward(self, embeddings: Tensor, states: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        """Return the predicted states [B, T, hidden] at tokens of which these are the embeddings,
        [B, T, hidden]. states: [B, T, hidden], at the token before each."""
        x = self.fc(torch.cat([embeddings, states], dim=-1) * self.scale)
        return run_layer(self.layer, x, rotary, attend)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by their names in a checkpoint, with the scale folded into fc."""
        found = {"fc.weight": self.fc.weight * self.scale, "fc.bias": self.fc.bias}
        return found | {LAYER + name: w for name, w in self.layer.named_parameters()}


class PathAttention:
    """The attention of all passes. In pass d, from 0 on, each token is a tree node at depth d.

    It attends to itself with a key of pass d, to its d - 1 nearest ancestors with keys of passes
    d - 1 to 1, one of each, and to all older tokens with keys of pass 0, which are those of
    committed tokens. For example, in pass 2 the parent's key is of pass 1.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []  # [B, H, T, D] of each pass
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        depth = len(self.keys) - 1
        position = torch.arange(q.shape[2], device=q.device)
        distance = position[:, None] - position  # [T, T], query position - key position
        masks = [distance >= depth]  # keys of pass 0
        masks += [distance == depth - n for n in range(1, depth + 1)]  # keys of pass n
        keys, values = torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)
        mask = torch.cat(masks, dim=1)  # [T, (depth + 1) * T]
        return F.scaled_dot_product_attention(q, keys, values, mask)


def run_passes(
    head: TrainableHead, embeddings: Tensor, states: Tensor, rotary: Tensor
) -> list[Tensor]:
    """Return the states [B, T, hidden] that each pass predicts. states: the target's."""
    attend, predictions = PathAttention(), []
    for _ in range(N_PASSES):
        before = F.pad(states[:, :-1], (0, 0, 1, 0))  # zeros before the first token
        states = head(embeddings, before, rotary, attend)
        predictions.append(states)
    return predictions


def head_loss(head: TrainableHead, target: GPTNeoX, rows: Tensor) -> Tensor:
    """Return the loss of a head on sequences [B, T], the mean over its passes.

    With probabilities p of the target, a normed prediction x and the output matrix W [V, hidden],
    the cross-entropy is logsumexp(x W^T) - x . (p W). p W is the same for all passes.
    """
    rotary = rotary_table(target.config, rows.shape[1], target.device)
    matrix = target.embed_out.weight
    with torch.no_grad():
        embeddings = target.gpt_neox.embed_in(rows)
        states = run_layers(target, rows, rotary)  # [B, T, hidden]
        probs = target.logits(states).softmax(-1)  # [B, T, V]
        mean_output = (probs @ matrix).float()  # p W, [B, T, hidden]
    losses = []
    for predicted in run_passes(head, embeddings, states, rotary):
        x = target.gpt_neox.final_layer_norm(predicted)
        logits = F.linear(x, matrix).float()
        cross_entropy = logits.logsumexp(-1) - (x.float() * mean_output).sum(-1)  # [B, T]
        distance = F.smooth_l1_loss(predicted.float(), states.float())
        losses.append(cross_entropy.mean() + STATE_WEIGHT * distance)
    return torch.stack(losses).mean()


def train_head(
    target: GPTNeoX, folder: Path, text: Tensor, progress: Progress, args: Namespace
) -> tuple[dict[str, Tensor], dict]:
    """Train a head, and return its tensors by name and its config.json.

    Args:
        folder: the target's.
        text: ids [n].
        args: of dynatree_lab/training/distil.py.
    """
    if progress.saved:
        own_rows = progress.saved["model"]["own_rows"]
    else:
        print_line(f"the target writes {own_text.N_SEQUENCES:,} sequences to train on")
        with autocast_for(target.device):
            own_rows = own_text.write_own_text(target, text, args.context)
    head = TrainableHead(target, own_rows).to(target.device)

    def loss_of(step: int) -> Tensor:
        rows = draw_batch(head.own_rows, text, step, args).to(target.device)
        with autocast_for(target.device):
            return head_loss(head, target, rows)

    train(head, loss_of, progress, args)
    return head.tensors(), head_json(folder, target, args.target)


def draw_batch(own_rows: Tensor, text: Tensor, step: int, args: Namespace) -> Tensor:
    """Return the batch of a step, [B, T]: a third, rounded down, of text, the rest of own_rows."""
    generator = torch.Generator().manual_seed(step)
    n_text = args.batch // 3
    indices = torch.randint(len(own_rows), (args.batch - n_text,), generator=generator)
    return torch.cat([draw_rows(text, n_text, args.context, step), own_rows[indices].cpu()])


def head_json(folder: Path, target: GPTNeoX, name: str) -> dict:
    """Return the config.json of a head. folder, name: of the target."""
    found = read_json(folder / "config.json")
    found.pop("architectures", None)  # it names a class that cannot load a head
    stored = load_tensors(folder, target.config, torch.device("cpu"), torch.float32)
    own = {"model_type": HEAD_TYPE, "num_hidden_layers": 1, "target": name}
    return found | own | {"target_digest": target_digest(stored)}
