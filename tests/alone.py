"""What the five files do where nothing else of the project is: run by test_core.py, in a folder of
their own. Prompts come on standard input as JSON, what was found goes to standard output."""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from draft_tree import DynaTree, Settings
from dynatree import generate
from gpt_neox import Config, GPTNeoX, KVCache
from sampling import Sampler, Sampling

N_TOKENS = 100
N_SAMPLED = 4  # the second tree may be one level deep, the first two
CONFIG = Config(3, 8, 1, 2, 16, 16, 1.0, 10000.0)  # three ids, one layer of two heads


class Watched(GPTNeoX):
    """Keeps the cache that it made last."""

    def new_cache(self, capacity: int) -> KVCache:
        self.cache = super().new_cache(capacity)
        return self.cache


@torch.inference_mode()
def distance(model: Watched, text: list[int]) -> float:
    """How far its cache is from that of one prefill of all that is committed of a text."""
    n = model.cache.length
    fresh = GPTNeoX.new_cache(model, n)
    model.prefill(text[:n], fresh)
    return (model.cache.kv[:, :, :, :n] - fresh.kv).abs().max().item()


def write(target: Watched, draft: Watched, prompt: list[int]) -> dict:
    """A greedy text, its trees and the greatest distance of both caches after any commit."""
    ids, trees, worst = [], [], 0.0
    for step in generate(target, draft, prompt, DynaTree(), N_TOKENS):
        ids += step.tokens
        trees.append([step.n_drafted, len(step.path), step.draft_rows])
        assert target.cache.length == len(prompt + ids) - 1, "all but the pending token"
        for model in (target, draft) if step.tree else (target,):
            worst = max(worst, distance(model, prompt + ids))
    return {"ids": ids, "trees": trees, "distance": worst}


class Scripted(Sampler):
    """A sampler whose every choice is fixed beforehand, and how likely it is that they come so."""

    def choose(self, chances: list[float]) -> int:
        """One of the possible options, as the script says; the first past its end."""
        script, taken = self.settings.script, self.settings.taken
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        at = script[len(taken)] if len(taken) < len(script) else 0
        taken.append((at, len(possible), chances[possible[at]]))
        return possible[at]

    def draw(self, probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        ids = []
        for row in probs.tolist():
            drawn = []
            for _ in range(k):
                left = [0.0 if i in drawn else p for i, p in enumerate(row)]
                drawn.append(self.choose([p / sum(left) for p in left]))
            ids.append(drawn)
        return torch.tensor(ids), probs.gather(1, torch.tensor(ids))

    def coin(self) -> "Coin":
        return Coin(self)


class Coin:
    """Uniform on [0, 1), compared once."""

    def __init__(self, sampler: Scripted):
        self.sampler = sampler

    def __lt__(self, chance: float) -> bool:
        return self.sampler.choose([chance, 1 - chance]) == 0


class Script(Sampling):
    """Sampling as a script says; `taken`: which of how many options, and how likely it was."""

    def sampler(self, device: torch.device, tried: None = None) -> Scripted:
        return Scripted(self, None, None)


def law(
    target: GPTNeoX, draft: GPTNeoX, settings: Settings, n: int = N_SAMPLED
) -> dict[tuple[int, ...], float]:
    """The probability of each text of n tokens that generate may write, over all that may happen
    on the way."""
    found: dict[tuple[int, ...], float] = {}
    script: list[int] | None = []
    while script is not None:
        sampling = Script(temperature=0.8)
        for name, value in {"script": script, "taken": []}.items():
            object.__setattr__(sampling, name, value)
        steps = generate(target, draft, [0], settings, n, sampling=sampling)
        text = tuple(token for step in steps for token in step.tokens)
        chance = 1.0
        for *_, p in sampling.taken:
            chance *= p
        found[text] = found.get(text, 0.0) + chance
        script = following(sampling.taken)
    return found


def following(taken: list[tuple[int, int, float]]) -> list[int] | None:
    """The next script, counting up from the last choice; None after the last one."""
    for i in reversed(range(len(taken))):
        at, n_options, _ = taken[i]
        if at + 1 < n_options:
            return [earlier for earlier, *_ in taken[:i]] + [at + 1]
    return None


@torch.inference_mode()
def right_law(target: GPTNeoX, n: int) -> dict[tuple[int, ...], float]:
    """What the target alone writes, of n tokens."""
    found = {(): 1.0}
    for _ in range(n):
        longer = {}
        for text, chance in found.items():
            logits = target.prefill([0, *text], target.new_cache(n)).logits[0]
            for token, p in enumerate(torch.softmax(logits / 0.8, dim=0).tolist()):
                longer[*text, token] = chance * p
        found = longer
    return found


def random_model(seed: int, config: Config = CONFIG) -> GPTNeoX:
    """Of weights large enough that some texts are likelier than others."""
    torch.manual_seed(seed)
    model = GPTNeoX(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    return model.double().requires_grad_(False)


def main() -> None:
    torch.set_num_threads(1)
    tiny = Path("models/tiny")
    target, draft = (Watched.from_pretrained(tiny / name) for name in ("target", "draft"))
    texts = [write(target, draft, prompt) for prompt in json.load(sys.stdin)]
    pair = random_model(1), random_model(2)
    found = law(*pair, DynaTree(B_min=1, B_mid=2, B_max=2, tau_h=0.6, tau_l=0.3, rho_stop=0.2))
    right = right_law(pair[0], N_SAMPLED)
    off = max(abs(found.get(text, 0.0) - chance) for text, chance in right.items())
    here = Path.cwd()
    files = [getattr(module, "__file__", None) for module in sys.modules.values()]
    own = sorted(Path(file).name for file in files if file and Path(file).parent == here)
    names = sorted({name.partition(".")[0] for name in sys.modules})
    print(json.dumps({"texts": texts, "law": [sum(found.values()), off], "own": own, "all": names}))


if __name__ == "__main__":
    main()
