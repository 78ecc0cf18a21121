"""The papers' own tables: their rows, lengths, datasets and numbers of prompts, on our models, and
what they print beside what is measured here.

    python bench.py --table v2-1
    python bench.py --table v2-1 --dataset wikitext2 --new-tokens 200 --n-prompts 4

v1 and v2 are the two versions of the DynaTree paper, whose trees in v1 are static: our `fixed`.
Their prompts are ten, the first two to warm up, which is done apart here; and the
rows and lengths of their figures are those of the authors' scripts, which count the prompts' 800 in
characters. A title says what else is different here. The tables of the other papers are in
benchmark/presets_others.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmark.peers import PEERS
from benchmark.presets_others import CHECKS, OTHERS, Printed
from benchmark.tables import Part, Table

WIKITEXT = Part((), "wikitext2", n_prompts=8, prompt_tokens=(800,), new_tokens=(1500,))
PG19 = replace(WIKITEXT, dataset="pg19", prompt_tokens=(1000,))
V1_WIKITEXT = replace(WIKITEXT, new_tokens=(500,))
V1_PG19 = replace(V1_WIKITEXT, dataset="pg19")

LESS = "; trees of 64 rows at most where it has 256"
LEAST = "; trees of 128 rows at most where it has 256"  # which tau=0.01 would fill

SPEED = ["throughput_mean", "speedup_mean", "speedup"]
MEMORY = ["peak", "more_memory", "floor"]


def printed(columns: str, rows: dict[str, str]) -> Printed:
    """Rows with what a paper prints in these columns, - for nothing."""
    names = columns.split()
    found: Printed = {}
    for row, text in rows.items():
        values = text.split()
        assert len(values) == len(names), f"{row}: {text} for {columns}"
        found[row] = {}
        for i, value in enumerate(values):
            if value != "-":
                found[row][names[i]] = value
    return found


def part_of(part: Part, published: Printed, columns: Sequence[str] = ()) -> Part:
    """The part with the printed rows; transformers' come with --peers. columns: only these."""
    methods = tuple(row for row in published if row not in PEERS)
    if columns:
        published = {row: only(cells, columns) for row, cells in published.items()}
    return replace(part, methods=methods, published=published)


def only(cells: dict[str, str], columns: Sequence[str]) -> dict[str, str]:
    return {name: value for name, value in cells.items() if name in columns}


def fixed_grid() -> Iterator[str]:
    """The static tree's 90 shapes (v1, 4.5; v2, B.2)."""
    for depth in range(3, 9):
        for branches in (2, 3, 4):
            for tau in (0.01, 0.02, 0.03, 0.05, 0.1):
                yield fixed_row(depth, branches, tau)


def fixed_row(depth: int, branches: int, tau: float) -> str:
    return f"fixed D={depth} B={branches} tau={tau} N_max=128"


# The 193.4 of v1's text and figure 3, its abstract's 210.8 and figure 4's 221.4 are in none of its
# tables, which have 185 at 500 tokens
V1_1 = printed(
    "throughput_mean speedup_mean code_acceptance tokens_per_iter",
    {
        "ar": "119.4 1.00x - 1.0",
        "hf-assisted": "161.9 1.36x - 3.0",
        "linear K=6": "133.1 1.11x 81.2% 4.87",
        "linear K=7": "138.7 1.16x 76.2% 5.33",
        "linear K=6 window=512": "132.9 1.11x - -",
        "fixed D=6 B=2 tau=0.05": "185.2 1.55x 79.5% 5.56",
        "fixed D=7 B=2 tau=0.05": "184.6 1.55x 72.6% 5.81",
    },
)
V1_2 = printed(
    "ttft tpot",
    {
        "ar": "18.69 7.47",
        "linear K=6": "12.17 6.16",
        "fixed D=6 B=2 tau=0.05": "12.48 5.46",
    },
)
V1_3 = printed(
    "draft_nodes tokens_per_iter acceptance",
    {
        "ar": "- - -",
        "linear K=6": "6 4.10 0.68",
        "fixed D=8 B=3 tau=0.03 N_max=128": "~18 6.94 0.38",
    },
)
V1_4 = printed(
    "throughput_mean speedup_mean code_acceptance",
    {
        "ar T=100": "73.5 - -",
        "ar T=200": "125.7 - -",
        "ar T=500": "133.2 - -",
        "ar T=750": "126.3 - -",
        "ar T=1000": "131.0 - -",
        fixed_row(5, 2, 0.05) + " T=100": "113.4 1.54x 50.3%",
        fixed_row(6, 2, 0.05) + " T=200": "166.2 1.32x 72.0%",
        fixed_row(6, 2, 0.05) + " T=500": "185.3 1.39x 79.5%",
        fixed_row(7, 2, 0.05) + " T=750": "186.7 1.48x 75.1%",
        fixed_row(7, 2, 0.05) + " T=1000": "205.6 1.57x 73.3%",
    },
)
V1_4_PART = replace(
    V1_WIKITEXT,
    methods=("ar",) + tuple(fixed_grid()),
    n_prompts=2,
    new_tokens=(100, 200, 500, 750, 1000),
    published=V1_4,
)
V1_5_PG19 = printed(
    "throughput_mean speedup_mean",
    {
        "ar": "126.0 1.00x",
        "linear K=6": "151.5 1.20x",
        "linear K=7": "150.7 1.20x",
        "fixed D=6 B=2 tau=0.05": "165.7 1.32x",
        "fixed D=7 B=2 tau=0.05": "160.1 1.27x",
    },
)
V1_5_WIKITEXT = printed(
    "throughput_mean speedup_mean",
    {
        "ar": "133.2 1.00x",
        "linear K=6": "167.7 1.26x",
        "linear K=7": "173.4 1.30x",
        "fixed D=6 B=2 tau=0.05": "185.3 1.39x",
        "fixed D=7 B=2 tau=0.05": "184.5 1.39x",
    },
)
V1_6 = printed(
    "throughput_mean speedup_mean",
    {
        "ar L=100": "132.8 -",
        "ar L=200": "127.4 -",
        "ar L=800": "133.2 -",
        "ar L=1000": "135.0 -",
        "linear K=6 L=100": "158.4 1.19x",
        "linear K=6 L=200": "175.6 1.38x",
        "linear K=6 L=800": "167.7 1.26x",
        "linear K=6 L=1000": "139.8 1.04x",
        "linear K=7 L=100": "161.7 1.22x",
        "linear K=7 L=200": "178.2 1.40x",
        "linear K=7 L=800": "173.4 1.30x",
        "linear K=7 L=1000": "143.1 1.06x",
        "fixed D=6 B=2 tau=0.05 L=100": "181.2 1.36x",
        "fixed D=6 B=2 tau=0.05 L=200": "197.9 1.55x",
        "fixed D=6 B=2 tau=0.05 L=800": "185.3 1.39x",
        "fixed D=6 B=2 tau=0.05 L=1000": "162.8 1.21x",
        "fixed D=7 B=2 tau=0.05 L=100": "177.0 1.33x",
        "fixed D=7 B=2 tau=0.05 L=200": "198.0 1.55x",
        "fixed D=7 B=2 tau=0.05 L=800": "184.5 1.39x",
        "fixed D=7 B=2 tau=0.05 L=1000": "172.6 1.28x",
    },
)
V1_6_PART = replace(
    V1_WIKITEXT,
    methods=tuple(V1_5_WIKITEXT),
    prompt_tokens=(100, 200, 800, 1000),
    published=V1_6,
)
V1_7_PG19 = printed(
    "peak",
    {
        "ar": "5855.1",
        "linear K=6": "5817.3",
        "linear K=7": "5817.7",
        "fixed D=6 B=2 tau=0.05": "5883.7",
        "fixed D=7 B=2 tau=0.05": "5883.7",
    },
)
V1_7_WIKITEXT = printed(
    "peak",
    {
        "ar": "5798.6",
        "linear K=6": "5786.3",
        "linear K=7": "5786.2",
        "fixed D=6 B=2 tau=0.05": "5822.9",
        "fixed D=7 B=2 tau=0.05": "5822.9",
    },
)

V2_SPEED = ["throughput_mean", "speedup_mean"]  # of table 1
V2_LATENCY = ["ttft", "tpot"]  # of table 2
V2_EFFICIENCY = ["code_acceptance", "tokens_per_iter", "path_length", "iterations"]  # of table 3
V2_COLUMNS = " ".join(V2_SPEED + V2_LATENCY + V2_EFFICIENCY)
# Tables 1, 2 and 3. K=8, on PG-19 K=5, and the tuned static tree are from the captions; D_max=9 on
# PG-19, and tau=0.05 of the plain static tree of table 4 and on, from the authors' code
V2_WIKITEXT = printed(
    V2_COLUMNS,
    {
        "ar": "133.4±0.5 1.00x 18.9±6.1 7.48±0.02 - 1.00 - 1500",
        "linear K=8": "196.1±37.8 1.47x 14.6±4.0 5.32±1.24 88.2% 6.82 7.05 220",
        "fixed D=8 B=3 tau=0.1": "200.7±41.7 1.50x 14.6±4.2 5.30±1.63 71.0% 6.79 7.10 221",
        "dynatree": "219.5±22.2 1.64x 14.4±4.0 4.59±0.47 102.2% 7.08 7.15 212",
    },
)
V2_PG19 = printed(
    V2_COLUMNS,
    {
        "ar": "114.8±20.6 1.00x 21.8±8.7 9.00±1.69 - 1.00 - 1500",
        "linear K=5": "144.9±28.6 1.26x 11.1±3.3 7.17±1.42 92.5% 4.56 4.63 329",
        "fixed D=8 B=3 tau=0.1": "185.5±33.2 1.62x 9.7±0.4 5.55±0.95 64.3% 6.20 6.43 242",
        "dynatree D_max=9": "194.9±35.6 1.70x 9.6±0.6 5.30±1.02 92.2% 6.17 6.45 243",
    },
)
V2_4 = printed(
    "throughput_mean speedup_mean",
    {
        "ar": "- -",
        "fixed D=5 B=2": "188.0±16.5 1.42x",
        "dynatree history=off": "213.2±26.1 1.61x",
        "dynatree": "218.5±22.2 1.65x",
    },
)
V2_5_PG19 = printed(
    "peak",
    {"ar": "6157.7", "linear K=5": "6360.5", "fixed D=5 B=2": "6358.3", "dynatree": "6359.4"},
)
V2_5_WIKITEXT = printed(
    "peak",
    {"ar": "6110.0", "linear K=5": "6313.8", "fixed D=5 B=2": "6312.8", "dynatree": "6316.1"},
)
V2_FOUR = ("ar", "linear K=5", "fixed D=5 B=2", "dynatree")  # of figures 5 and 8


def v2_both(columns: Sequence[str]) -> tuple[Part, Part]:
    """Both datasets of tables 1 to 3, with what one of them prints."""
    return part_of(WIKITEXT, V2_WIKITEXT, columns), part_of(PG19, V2_PG19, columns)


def v2_sensitivity() -> Iterator[str]:
    """Figure 6: thresholds, then bounds of breadth, then of depth; the first row is the paper's."""
    yield "ar"
    yield "fixed D=5 B=2"
    yield "dynatree"
    for tau_h, tau_l in (
        (0.6, 0.2),
        (0.7, 0.3),
        (0.7, 0.4),
        (0.7, 0.5),
        (0.8, 0.3),
        (0.8, 0.4),
        (0.8, 0.5),
        (0.8, 0.6),
        (0.9, 0.5),
        (0.9, 0.6),
        (0.9, 0.7),
        (0.95, 0.3),
    ):
        yield f"dynatree tau_h={tau_h} tau_l={tau_l}"
    for b_min, b_max in ((1, 2), (1, 4), (1, 5), (2, 3), (2, 4), (2, 5), (3, 5)):
        yield f"dynatree B_min={b_min} B_mid={max(b_min, 2)} B_max={b_max}"
    for d0, d_max in ((4, 6), (5, 7), (6, 8), (6, 10), (7, 10), (8, 12)):
        yield f"dynatree D0={d0} D_max={d_max}"


PRESETS = {
    "v1-1": Table(
        "DynaTree v1, table 1: main results; transformers' row with --peers; the window is that of "
        "the authors' script; accept (code) divides by D + 2 where v1 has D + 1" + LESS,
        SPEED + ["code_acceptance", "acceptance", "tokens_per_iter"] + CHECKS,
        (part_of(V1_WIKITEXT, V1_1),),
    ),
    "v1-2": Table(
        "DynaTree v1, table 2: latency" + LESS,
        ["ttft", "tpot"] + CHECKS,
        (part_of(V1_WIKITEXT, V1_2),),
    ),
    "v1-3": Table(
        "DynaTree v1, table 3: verification efficiency; its acceptance counts the bonus (4.10 / 6, "
        "6.94 / 18), and accept does not" + LEAST,
        ["draft_nodes", "tokens_per_iter", "acceptance"] + CHECKS,
        (part_of(V1_WIKITEXT, V1_3),),
    ),
    "v1-4": Table(
        "DynaTree v1, table 4 and figures 4, 5, 6 and 9: the best of 90 static trees at each of "
        "five lengths T, on two prompts" + LEAST,
        SPEED + ["code_acceptance", "tokens_per_iter", "draft_nodes"] + CHECKS,
        (V1_4_PART,),
    ),
    "v1-5": Table(
        "DynaTree v1, table 5 and figure 7: two datasets" + LESS,
        SPEED + CHECKS,
        (part_of(V1_PG19, V1_5_PG19), part_of(V1_WIKITEXT, V1_5_WIKITEXT)),
    ),
    "v1-6": Table(
        "DynaTree v1, table 6 and figure 8: prompt length L, in tokens where the authors' script "
        "counts characters" + LESS,
        SPEED + ["ttft"] + CHECKS,
        (V1_6_PART,),
    ),
    "v1-7": Table(
        "DynaTree v1, table 7: peak memory, each text in a process of its own" + LESS,
        MEMORY,
        (
            replace(part_of(V1_PG19, V1_7_PG19), n_prompts=10),
            replace(part_of(V1_WIKITEXT, V1_7_WIKITEXT), n_prompts=10),
        ),
        is_memory=True,
    ),
    "v2-1": Table(
        "DynaTree v2, table 1 and figure 3: main results" + LESS,
        SPEED + CHECKS,
        v2_both(V2_SPEED),
    ),
    "v2-2": Table("DynaTree v2, table 2: latency" + LESS, V2_LATENCY + CHECKS, v2_both(V2_LATENCY)),
    "v2-3": Table(
        "DynaTree v2, table 3: verification efficiency; its path counts the bonus token" + LESS,
        V2_EFFICIENCY + ["acceptance", "matching"] + CHECKS,
        v2_both(V2_EFFICIENCY),
    ),
    "v2-4": Table(
        "DynaTree v2, table 4 and figure 4: breadth and depth, then history" + LESS,
        SPEED + ["tokens_per_iter", "iterations", "code_acceptance"] + CHECKS,
        (part_of(WIKITEXT, V2_4),),
    ),
    "v2-5": Table(
        "DynaTree v2, table 5: peak memory, each text in a process of its own" + LESS,
        MEMORY,
        (part_of(PG19, V2_5_PG19), part_of(WIKITEXT, V2_5_WIKITEXT)),
        is_memory=True,
    ),
    "v2-fig5": Table(
        "DynaTree v2, figure 5: text length T" + LESS,
        SPEED + ["tokens_per_iter", "path_length", "code_acceptance"] + CHECKS,
        (
            replace(
                WIKITEXT,
                methods=V2_FOUR,
                new_tokens=(100, 200, 300, 500, 1000, 1200, 1500, 1800),
            ),
        ),
    ),
    "v2-fig6": Table(
        "DynaTree v2, figure 6: thresholds, breadth and depth, without the five "
        "cross-combinations of the authors' script (B.1), which no panel shows" + LESS,
        SPEED + ["tokens_per_iter", "draft_nodes"] + CHECKS,
        (replace(WIKITEXT, methods=tuple(v2_sensitivity())),),
    ),
    "v2-fig7": Table(
        "DynaTree v2, figure 7: 90 static trees" + LEAST,
        SPEED + ["tokens_per_iter", "draft_nodes"] + CHECKS,
        (replace(WIKITEXT, methods=("ar",) + tuple(fixed_grid())),),
    ),
    "v2-fig8": Table(
        "DynaTree v2, figure 8: prompt length L, in tokens where the authors' script counts "
        "characters" + LESS,
        SPEED + ["ttft"] + CHECKS,
        (replace(WIKITEXT, methods=V2_FOUR, prompt_tokens=(100, 200, 300, 500, 750, 1000)),),
    ),
}
PRESETS |= OTHERS

NOT_HERE = {  # a paper's table -> what it needs that this project has not
    "dyspec-4": "768 rows a tree, and MAX_ROWS is 128; dyspec-1 has the methods",
    "dyspec-5": "an attention kernel that skips blocks",
    "graft-long": "LLaMA3.1-8B and Qwen3-14B, with EAGLE-3's heads for long contexts",
    "graft-large": "Qwen3-235B and EAGLE-3's heads for it",
    "graft-block": "DFlash, a draft that writes blocks at once",
}
