"""The playground: a page that replays a greedy text under other settings, without a model.

    result = write_text(load_pair(), "She opened the door", max_new_tokens=64)
    content = playground_data(*record(result), result.request.pair.tokenizer)
    Path("playground.html").write_text(as_playground(content), encoding="utf-8")

The page has the draft's candidates along the text (replay/candidates.py), all that its sliders ask
for, and the rules of five methods in JavaScript (page/playground/). Its numbers come from here:
defaults and meanings of settings, thresholds of history, prices. It marks a tree for which the
recording lacks candidates.
"""

import base64
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy
from numpy import ndarray
from tokenizers import Tokenizer

from draft_tree import D0_MIN, GOOD_RATIO, HISTORY_STEP, POOR_RATIO, RHO_DEEP_BOUNDS, TAU_H_BOUNDS
from dynatree import draft_temperature
from dynatree_lab.errors import UsageError
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.html_page import fill, method_colour
from dynatree_lab.methods import METHODS
from dynatree_lab.pair import dtype_name
from dynatree_lab.replay.candidates import CandidateTree, Width, make_candidates
from dynatree_lab.replay.prices import Prices
from dynatree_lab.replay.texts import RecordedText
from dynatree_lab.result import Result
from dynatree_lab.trace import pieces

STYLES = ("base.css", "playground/style.css")
# In order: a file may read what those before it define while the page starts
PARTS = (
    "recording", "rules", "grow", "replay", "settings", "words", "sliders", "text", "tree",
    "result", "envelope", "questions", "main",
)  # fmt: skip
SCRIPTS = ("elements.js", "layout.js", *(f"playground/{name}.js" for name in PARTS))
TEMPERATURES = (0.4, 0.5, 0.6, 0.7, 0.85, 1.0)  # of the draft; none is above 1
WIDTH = Width(n_best=31, min_candidates=1)  # of the recording: dyspec N=32 counts the root
SUM_SCALE = 2**19  # steps per unit of a log-sum, whose three bytes reach to -32

DEPTHS, BREADTHS, SWITCH = range(1, WIDTH.max_depth + 1), range(1, 7), (False, True)
ROWS = (4, 8, 12, 16, 24, 32, 48, 64)
CONFIDENCES = tuple(i / 20 for i in range(21))
THRESHOLDS = (
    WIDTH.min_probability, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.6, 0.7, 0.8, 0.9,
)  # fmt: skip
# The values of the sliders, by method, group and setting. The recording has all that they ask for
SLIDERS: dict[str, dict[str, dict[str, Sequence[float]]]] = {
    "ar": {},
    "linear": {"One chain": {"K": range(WIDTH.max_depth + 1)}},
    "fixed": {"One shape": {"B": BREADTHS, "D": DEPTHS, "tau": THRESHOLDS, "N_max": ROWS}},
    "dynatree": {
        "Breadth: which children are added": {
            "B_min": BREADTHS, "B_mid": BREADTHS, "B_max": BREADTHS, "tau_h": CONFIDENCES,
            "tau_l": CONFIDENCES, "tau": THRESHOLDS, "N_max": ROWS, "adapt_breadth": SWITCH,
        },
        "Depth: which nodes get children": {
            "rho_stop": THRESHOLDS, "rho_deep": THRESHOLDS, "D0": DEPTHS, "D_max": DEPTHS,
            "adapt_depth": SWITCH,
        },
        "Between trees": {"W": range(1, 21), "history": SWITCH},
    },
    "dyspec": {"The likeliest nodes": {"N": range(1, WIDTH.n_best + 2), "D_max": DEPTHS}},
}  # fmt: skip
ONE_ROW = 1.0135  # of a streamed pass of one row, in iterations without rows
PRICES = {
    "embedded pair, measured": Prices(0.92, 0.08, 0.32),
    "rows are free, a draft pass is 1/5": Prices(1.0, 0.0, 0.2),
    "target read from disk": Prices(1 / ONE_ROW, 0.0135 / ONE_ROW, 0.0007 / ONE_ROW),
}


def record(result: Result) -> tuple[RecordedText, CandidateTree]:
    """Return a result's text, and the draft's candidates along it with the numbers of the page.
    Raises UsageError for a text that is too short."""
    request, pair, ids = result.request, result.request.pair, result.ids
    if len(ids) < 3:
        raise UsageError(f"the text has {len(ids)} tokens, a playground needs at least 3")
    text = RecordedText(
        prompt=request.prompt,
        ids=ids,
        model=str(pair.target_folder),
        weights="",  # only this process reads the text
        dtype=dtype_name(pair.target.dtype),
        vocab_size=pair.target.config.vocab_size,
        eos_ids=list(request.eos_ids),
        tokenizer="",
    )
    return text, rounded(make_candidates(pair.draft, [text], WIDTH, TEMPERATURES))


def rounded(tree: CandidateTree) -> CandidateTree:
    """Return the candidates with log-sums as three bytes hold them: up to 0, because no temperature
    is above 1. At 1 they are 0, because the log-probabilities are normalised."""
    sums = numpy.where(tree.temperatures == 1, 0, tree.log_sums.astype(float))
    sums = numpy.nan_to_num(sums).clip(-(2**24 - 1) / SUM_SCALE, 0)  # nan: the draft overflowed
    return replace(tree, log_sums=numpy.round(sums * SUM_SCALE) / SUM_SCALE)


def pack(tree: CandidateTree, n_ids: int) -> dict:
    """Return rounded candidates as JSON, without the log-sums at temperature 1. n_ids: the
    target's V."""
    token_bytes = 2 if n_ids <= 2**16 else 3
    sums = -tree.log_sums[:, tree.temperatures != 1] * SUM_SCALE
    return {
        "temperatures": tree.temperatures.tolist(),
        "sum_scale": SUM_SCALE,
        "token_bytes": token_bytes,
        "tree_sizes": tree.tree_sizes.tolist(),
        "n_children": pack_integers(tree.n_children, 1),
        "n_candidates": pack_integers(tree.n_candidates, 1),
        "tokens": pack_integers(tree.tokens, token_bytes),
        "logprobs": in_base64(tree.logprobs.astype("<f4")),
        "log_sums": pack_integers(sums, 3),
    }


def pack_integers(values: ndarray, n_bytes: int) -> str:
    """Return integers from 0 on as this many little-endian bytes each, in base64."""
    return in_base64(values.astype("<u4").reshape(-1, 1).view(numpy.uint8)[:, :n_bytes])


def in_base64(values: ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def playground_data(
    text: RecordedText, candidates: CandidateTree, tokenizer: Tokenizer, options: Sequence[str] = ()
) -> dict:
    """Return the data of a playground. options: of the command line, that choose the models."""
    prompt = "".join(pieces(text.prompt, tokenizer))
    words = ["python", "-m", "dynatree_lab", "--prompt", prompt]
    used_ids = {*text.ids, *candidates.tokens.tolist()}
    return {
        "command": [*words, "--max-new-tokens", str(len(text.ids)), *options],
        "prompt": {"n_tokens": len(text.prompt), "text": prompt},
        "text": text.ids,
        "pieces": pieces(text.ids, tokenizer, text.eos_ids),
        "vocabulary": {str(i): tokenizer.decode([i], False) for i in sorted(used_ids)},
        "candidates": pack(candidates, text.vocab_size),
        "min_probability": WIDTH.min_probability,
        "draft_temperature": draft_temperature(text.temperature),
        "methods": {name: describe_method(name) for name in SLIDERS},
        "history": {
            "good_ratio": GOOD_RATIO,
            "poor_ratio": POOR_RATIO,
            "step": HISTORY_STEP,
            "D0_min": D0_MIN,
            "tau_h": TAU_H_BOUNDS,
            "rho_deep": RHO_DEEP_BOUNDS,
        },
        "prices": {name: [each.row, each.draft_pass] for name, each in PRICES.items()},
    }


def describe_method(name: str) -> dict:
    """Return what a method does, and its sliders by group and setting."""
    kind = METHODS[name]
    known = {f.name: f for f in fields(kind)}
    groups = {
        title: {
            setting: {
                "values": list(values),
                "default": known[setting].default,
                "meaning": known[setting].metadata["meaning"],
            }
            for setting, values in group.items()
        }
        for title, group in SLIDERS[name].items()
    }
    uses_temperature = GenerationConfig(kind()).method.has_temperature(False)
    about = kind.__doc__.partition(": ")[2]
    return {"about": about, "uses_temperature": uses_temperature, "groups": groups}


def as_playground(content: dict) -> str:
    """Return the HTML page that shows this data."""
    own = {name: method_colour(name) for name in SLIDERS}
    return fill("playground/template.html", STYLES, SCRIPTS, own, content)
