"""The tables of DEAGLE, DySpec and Graft, as benchmark/presets.py has DynaTree's own.

    python bench.py --table deagle-1
    python bench.py --table dyspec-2 --target NAME --draft NAME --prompts FILE

Their models and texts are not ours: the rows are measured on whatever models are named, and what a
table prints of its own stands beside them.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmark.tables import Part, Table

Printed = dict[str, dict[str, str]]  # row, and its sizes if they vary -> column -> as printed

CHECKS = ["repetition", "exact"]


def add(found: Printed, row: str, column: str, text: str) -> None:
    """A printed figure, behind those of the same row and column on a paper's other datasets."""
    cells = found.setdefault(row, {})
    if column in cells:
        text = f"{cells[column]} / {text}"
    cells[column] = text


# DEAGLE, tables 1 to 3: depth, then EAGLE-3 and DEAGLE on MT-Bench, HumanEval, GSM8K and Alpaca
VICUNA_13B = {  # temperature -> lines
    0.0: """
6 4.12 4.20 4.63 4.67 4.39 4.44 4.18 4.25
8 4.37 4.41 5.13 5.13 4.55 4.66 4.37 4.45
10 4.37 4.52 5.37 5.41 4.47 4.58 4.32 4.48
12 4.30 4.56 5.42 5.60 4.27 4.46 4.14 4.46
14 4.16 4.54 5.33 5.61 4.03 4.30 4.00 4.44
16 3.99 4.53 5.15 5.58 3.82 4.23 3.74 4.34
18 3.78 4.45 5.01 5.61 3.60 4.20 3.52 4.38
""",
    1.0: """
6 3.62 3.59 4.11 4.20 3.71 3.69 3.65 3.74
8 3.69 3.69 4.36 4.34 3.67 3.78 3.57 3.75
10 3.56 3.77 4.52 4.33 3.57 3.63 3.57 3.66
12 3.39 3.65 4.16 4.42 3.19 3.53 3.31 3.61
14 3.35 3.66 4.17 4.41 3.08 3.50 3.07 3.47
16 3.12 3.71 3.60 4.39 2.97 3.39 2.82 3.54
18 3.07 3.58 3.72 4.50 2.77 3.47 2.76 3.49
""",
}
LLAMA3_8B = {  # temperature -> lines
    0.0: """
6 3.73 3.75 4.02 3.91 3.91 3.89 3.87 3.86
8 3.85 3.95 4.28 4.30 4.01 4.01 4.11 4.13
10 3.80 3.96 4.31 4.52 3.84 4.06 4.01 4.13
12 3.53 3.92 4.19 4.41 3.62 3.90 3.85 4.17
14 3.40 3.90 3.89 4.37 3.39 3.86 3.55 4.14
16 3.16 3.89 3.71 4.36 3.18 3.91 3.30 4.08
18 3.01 3.94 3.57 4.38 3.01 3.88 3.20 4.08
""",
    1.0: """
6 2.68 2.67 3.36 3.44 3.29 3.24 3.24 3.27
8 2.62 2.77 3.41 3.50 3.27 3.22 3.19 3.26
10 2.48 2.65 3.45 3.55 3.01 3.27 3.07 3.21
12 2.31 2.79 3.29 3.52 2.88 3.05 2.86 3.04
14 2.31 2.76 3.22 3.55 2.60 3.09 2.71 3.08
16 2.07 2.65 2.89 3.52 2.44 3.13 2.58 3.05
18 1.98 2.67 2.82 3.52 2.35 3.15 2.34 3.10
""",
}
LLAMA3_70B = {  # temperature -> lines
    0.0: """
6 4.07 4.08 4.56 4.58 4.42 4.41 4.25 4.27
8 4.32 4.33 5.20 5.23 4.79 4.78 4.68 4.72
10 4.37 4.45 5.43 5.48 4.80 4.85 4.78 4.85
12 4.28 4.42 5.37 5.49 4.70 4.82 4.76 4.87
14 4.20 4.44 5.26 5.45 4.59 4.78 4.64 4.83
16 4.09 4.40 5.12 5.44 4.47 4.77 4.53 4.82
18 3.99 4.41 4.99 5.43 4.36 4.78 4.38 4.83
""",
    1.0: """
6 3.78 3.80 4.17 4.25 4.14 4.15 4.17 4.17
8 3.99 4.05 4.71 4.68 4.42 4.45 4.49 4.62
10 3.99 4.09 4.82 4.91 4.44 4.47 4.58 4.67
12 4.01 4.11 4.82 4.87 4.41 4.49 4.53 4.61
14 3.82 4.06 4.71 4.90 4.23 4.40 4.43 4.56
16 3.78 4.04 4.50 4.77 4.15 4.41 4.24 4.57
18 3.71 3.99 4.43 4.85 3.99 4.38 4.13 4.58
""",
}
# Table 4, of Llama3-8B on MT-Bench: depth, Exp, Momentum, Prob and Voting. At temperature 0, as it
# says and table 2 has the last column; section 4.4 says 1
VOTES = """
6 3.73 3.59 3.56 3.75
8 3.85 3.77 3.76 3.95
10 3.84 3.77 3.78 3.96
12 3.90 3.69 3.78 3.92
14 3.88 3.69 3.75 3.90
16 3.87 3.63 3.75 3.89
18 3.88 3.65 3.77 3.94
"""
INSTRUCTIONS = Part((), "wikitext2", n_prompts=80)  # as many as of each of its benchmarks


def deagle_row(method: str, depth: int, votes: str = "") -> str:
    """A row of DEAGLE's tables; the tree is that of EAGLE's code, as they print none."""
    return f"{method} k=10 N_max=60 D_max={depth}{votes}"


def of_every_depth(method: str, votes: str = "") -> tuple[str, ...]:
    return tuple(deagle_row(method, depth, votes) for depth in range(6, 19, 2))


BY_DEPTH = ("ar",) + of_every_depth("beam") + of_every_depth("deagle")


def deagle_printed(lines: str, temperature: float) -> Printed:
    """What tables 1 to 3 print at a temperature: the methods take turns in a line."""
    found: Printed = {}
    for line in lines.strip().splitlines():
        values = line.split()
        depth = int(values.pop(0))
        for i, value in enumerate(values):
            row = deagle_row(("beam", "deagle")[i % 2], depth)
            add(found, f"{row} t={temperature}", "speedup", f"{value}x")
    return found


def deagle_by_depth(number: int, model: str, lines: dict[float, str]) -> Table:
    """DEAGLE's table of this number, of which this model's figures are."""
    title = (
        f"DEAGLE, table {number}: depth, at temperature 0 and 1; its figures are {model}'s, on "
        "MT-Bench / HumanEval / GSM8K / Alpaca in turn, none of which is here; a draft model where "
        "it has EAGLE-3's heads, WikiText-2 where it has instructions, and 128 new tokens"
    )
    part = replace(
        INSTRUCTIONS,
        methods=BY_DEPTH,
        temperature=tuple(lines),
        published=deagle_printed(lines[0.0], 0.0) | deagle_printed(lines[1.0], 1.0),
    )
    columns = ["throughput", "speedup", "tokens_per_iter", "draft_passes", "draft_nodes"]
    return Table(title, columns + CHECKS, (part,))


EXP = " votes=1 low=off momentum=off"
ONE_VOTE = (  # of table 4, in its order; the last has all three
    EXP,
    " votes=1 low=off length=off",
    " votes=1 momentum=off length=off",
    "",
)


LITERAL = " length=literal"  # Eq. 26 as it stands, which methods/deagle.py explains


def deagle_votes() -> Printed:
    """Table 4, a vote after the other; where the length vote counts, two depths of it literally."""
    found: Printed = {}
    for i, votes in enumerate(ONE_VOTE):
        for line in VOTES.strip().splitlines():
            values = line.split()
            depth = int(values[0])
            rows = [deagle_row("deagle", depth, votes)]
            if votes in (EXP, "") and depth in (6, 18):
                rows.append(rows[0] + LITERAL)
            for row in rows:
                add(found, row, "speedup", f"{values[i + 1]}x")
    return found


# DySpec, tables 1 to 3: dataset, temperature, then seconds a token and tokens an iteration of
# DySpec, Sequoia, SpecInfer and ar
JF68M_7B = """
C4 0 0.00730(5.25) 0.00871(4.99) 0.01289(3.32) 0.02303
C4 0.6 0.00994(3.71) 0.01185(3.45) 0.01215(3.44) 0.02191
OWT 0 0.00960(3.79) 0.01001(3.81) 0.01489(2.54) 0.02191
OWT 0.6 0.01096(3.07) 0.01206(3.04) 0.01262(2.97) 0.02634
CNN 0 0.00926(3.97) 0.00936(4.04) 0.01464(2.58) 0.02246
CNN 0.6 0.01071(3.18) 0.01127(3.22) 0.01245(3.06) 0.02242
"""
JF68M_13B = """
C4 0 0.00969(4.98) 0.01141(4.35) 0.01541(3.14) 0.03033
C4 0.6 0.01245(3.62) 0.01505(3.15) 0.01527(3.15) 0.02824
OWT 0 0.01270(3.59) 0.01340(3.44) 0.01872(2.44) 0.03117
OWT 0.6 0.01443(3.02) 0.01588(2.80) 0.01653(2.75) 0.02827
CNN 0 0.01190(3.82) 0.01248(3.67) 0.01803(2.52) 0.03054
CNN 0.6 0.01385(3.11) 0.01527(2.91) 0.01581(2.84) 0.02812
"""
LLAMA2_7B_70B = """
C4 0 0.53696(9.10) 0.88920(6.08) 1.14332(4.67) 5.59650
C4 0.6 0.78912(6.21) 0.94550(5.72) 0.92829(5.75) 5.34781
OWT 0 0.78106(7.23) 0.91815(6.41) 1.10449(4.83) 5.52462
OWT 0.6 0.87547(6.77) 0.94224(6.07) 0.97772(5.46) 5.30340
CNN 0 0.81716(6.93) 0.90751(6.42) 1.10608(4.83) 5.31049
CNN 0.6 0.89055(6.95) 0.92659(6.07) 0.92885(5.75) 5.29280
"""
DYSPEC_ROWS = ("dyspec N=64", "sequoia N=64", "specinfer widths=4:2:2:1:1", "ar")


def dyspec_printed(lines: str) -> Printed:
    """What one of them prints, in milliseconds."""
    found: Printed = {}
    for line in lines.strip().splitlines():
        cells = line.split()
        temperature = float(cells[1])
        for i, method in enumerate(DYSPEC_ROWS):
            row = f"{method} t={temperature}"
            seconds, _, tokens = cells[i + 2].rstrip(")").partition("(")
            add(found, row, "tpot", f"{1000 * float(seconds):.2f}")
            if tokens:
                add(found, row, "tokens_per_iter", tokens)
    return found


def dyspec_by_method(number: int, pair: str, lines: str) -> Table:
    """DySpec's table of this number, of which this pair's figures are."""
    title = (
        f"DySpec, table {number}: 64 rows a tree, temperature 0 and 0.6, guesses drawn at 0.6; "
        f"its figures are of {pair}, on C4 / OpenWebText / CNN in turn, none of which is here; "
        "WikiText-2 where it has those, and widths that it does not print"
    )
    part = Part(
        tuple(reversed(DYSPEC_ROWS)),
        "wikitext2",
        n_prompts=1000,
        prompt_tokens=(128,),
        temperature=(0.0, 0.6),
        draft_temperature=0.6,
        published=dyspec_printed(lines),
    )
    return Table(title, ["tpot", "tokens_per_iter", "speedup", "draft_nodes"] + CHECKS, (part,))


def graft_budgets() -> Iterator[str]:
    """A beam of N rows, as many from the table, and both."""
    yield "ar"
    for n in (8, 16, 32, 64, 128):
        yield f"beam N_max={n}"
        yield f"recycle N={n}"
        yield f"graft base=beam:N_max={n} N={n}"


OTHERS = {
    "deagle-1": deagle_by_depth(1, "Vicuna-13B", VICUNA_13B),
    "deagle-2": deagle_by_depth(2, "Llama3-8B", LLAMA3_8B),
    "deagle-3": deagle_by_depth(3, "Llama3-70B", LLAMA3_70B),
    "deagle-4": Table(
        "DEAGLE, table 4: each vote alone, then all, at depths 6 and 18 also with Eq. 26 as it "
        "stands (length=literal), beside the same figure; as deagle-1, at temperature 0, and "
        "figures of Llama3-8B on MT-Bench",
        ["throughput", "speedup", "tokens_per_iter", "draft_passes"] + CHECKS,
        (replace(INSTRUCTIONS, methods=("ar",) + tuple(deagle_votes()), published=deagle_votes()),),
    ),
    "deagle-fig2": Table(
        "DEAGLE, figure 2: the draft's passes by depth, in each iteration where it has the extra "
        "ones in each prompt (4.3, EAGLE-3 and DEAGLE, at depth 18 or the most: GSM8K 360.3 and "
        "131.6, HumanEval 517.5 and 203.1, MT-Bench 1224.5 and 394.8); as deagle-1, at "
        "temperature 0",
        ["draft_passes", "iterations", "tokens_per_iter", "path_length"] + CHECKS,
        (replace(INSTRUCTIONS, methods=BY_DEPTH),),
    ),
    "dyspec-1": dyspec_by_method(1, "JF68M and Llama2-7B", JF68M_7B),
    "dyspec-2": dyspec_by_method(2, "JF68M and Llama2-13B", JF68M_13B),
    "dyspec-3": dyspec_by_method(3, "Llama2-7B and Llama2-70B", LLAMA2_7B_70B),
    "graft-t": Table(
        "Graft, 4: pruning, retrieval and both, by temperature; a draft model where it has "
        "EAGLE-3's heads, so none of its figures is here",
        ["throughput", "speedup", "tokens_per_iter", "draft_passes"] + CHECKS,
        (
            replace(
                INSTRUCTIONS,
                methods=("ar", "lookup", "recycle", "confident", "beam", "deagle")
                + ("graft base=beam",),
                temperature=(0.0, 1.0),
            ),
        ),
    ),
    "graft-n": Table(
        "Graft, 4: a beam, retrieval and both, by N, the rows of a tree; as graft-t",
        ["throughput", "speedup", "tokens_per_iter", "draft_passes", "draft_nodes"] + CHECKS,
        (replace(INSTRUCTIONS, methods=tuple(graft_budgets())),),
    ),
    "graft-ablation": Table(
        "Graft, 2.2 and figure 2: the beam alone, pruned, part of it retrieved at the root and at "
        "the ends of the branches, then pruned and grafted, 32 rows each",
        ["throughput", "speedup", "tokens_per_iter", "draft_passes", "draft_nodes"] + CHECKS,
        (
            replace(
                INSTRUCTIONS,
                methods=(
                    "ar",
                    "beam",
                    "graft base=beam graft=off",
                    "graft base=beam:N_max=24 checkpoints=off",
                    "graft base=beam:N_max=24 checkpoints=off at=tail",
                    "graft base=beam",
                ),
            ),
        ),
    ),
}
