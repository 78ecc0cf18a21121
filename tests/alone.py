"""What the five files do where nothing else of the project is: run by test_core.py, in a folder of
their own beside law.py. Prompts come on standard input as JSON, what was found goes to standard
output."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from law import difference_by_generate

from draft_tree import DynaTree
from dynatree import generate
from gpt_neox import Config, GPTNeoX, KVCache
from sampling import Sampling

N_TOKENS = 50
N_SAMPLED = 5  # the first tree may be three levels deep
CONFIG = Config(2, 8, 1, 2, 16, 16, 1.0, 10000.0)  # two ids, one layer of two heads


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


def random_model(seed: int, **changes: int) -> GPTNeoX:
    """Of weights large enough that some texts are likelier than others."""
    torch.manual_seed(seed)
    model = GPTNeoX(replace(CONFIG, **changes))
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    return model.double().requires_grad_(False)


def main() -> None:
    torch.set_num_threads(1)
    tiny = Path("models/tiny")
    target, draft = (Watched.from_pretrained(tiny / name) for name in ("target", "draft"))
    texts = [write(target, draft, prompt) for prompt in json.load(sys.stdin)]
    pair = random_model(1), random_model(2)
    settings = DynaTree(B_min=1, B_mid=2, B_max=2, tau_h=0.6, tau_l=0.3, rho_stop=0.2)
    off = difference_by_generate(*pair, settings, N_SAMPLED, Sampling(0.8))
    here = Path.cwd()
    files = [getattr(module, "__file__", None) for module in sys.modules.values()]
    own = sorted(Path(file).name for file in files if file and Path(file).parent == here)
    names = sorted({name.partition(".")[0] for name in sys.modules})
    print(json.dumps({"texts": texts, "law": off, "own": own, "all": names}))


if __name__ == "__main__":
    main()
