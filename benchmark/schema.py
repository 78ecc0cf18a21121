"""What a results file may say: it may be anybody's, and everything that is shown relies on it.

check_results(read_json(file), str(file))  # raises ForeignFile, naming what is wrong
"""

from collections.abc import Sequence

from benchmark.peers import PEERS
from engine.foreign import (
    Either,
    ForeignFile,
    List,
    Map,
    Number,
    Object,
    Optional,
    Schema,
    Switch,
    Word,
    checked,
)
from methods import METHODS

LARGE = 1e12  # past any figure; what is drawn and divided stays far from where floats end
COUNT = Number(int, 0, 10**12)
SIZE = Number(int, 1, 10**12)
FIGURE = Number(float, -LARGE, LARGE)
DIVISOR = Number(float, 1 / LARGE, LARGE)
RATE = Either(Number(float, 0, 0), DIVISOR)  # 0 of a text of one token, which no pass follows


class Absent(Optional):
    """What a file from before may lack; it is never null."""

    def accept(self, value: object, where: str) -> object:
        return self.of.accept(value, where)


MACHINE = {name: Word() for name in ("target", "draft", "dtype", "processor")}
MACHINE |= {name: Word() for name in ("torch", "python", "commit")}
MACHINE |= {name: Absent(Word()) for name in ("transformers", "draft_dtype")}
MACHINE |= {"threads": SIZE, "ranks": Absent(SIZE)}
PROMPTS = {"dataset": Word(), "n": COUNT}
SIZES = {
    "prompt_tokens": List(SIZE),
    "new_tokens": List(SIZE),
    "temperature": List(Number(float, 0, LARGE)),
}
RUN = {
    "label": Word(),
    "method": Word(tuple(METHODS) + tuple(PEERS)),
    "settings": List(Word()),
    "commit": Word(("keep", "rebuild")),
    "prompt_tokens": SIZE,
    "new_tokens": SIZE,
    "temperature": Number(float, 0, LARGE),
    "baseline": Word(),
    "is_eager": Absent(Switch()),
    "is_strict": Absent(Switch()),
    "reference": Absent(Word()),
    "dataset": Absent(Word()),
    "window": Optional(SIZE),
    "sinks": Optional(COUNT),
    "draft_temperature": Optional(Number(float, 0, LARGE)),
    "published": Absent(Map(Word())),
}
STEP_TIMES = {
    "context": COUNT,
    "rows": List(SIZE),
    "target_ms": List(DIVISOR),
    "draft_ms": List(DIVISOR),
    "target_bytes": COUNT,
    "draft_bytes": COUNT,
    "copy_gb_s": DIVISOR,
}
RANK = {"rank": COUNT, "node": COUNT, "device": Word(), "processor": Word()}
DEPTHS = {"drafted": List(COUNT), "accepted": List(COUNT), "tried": Absent(List(COUNT))}
CALIBRATION = {"drafted": List(COUNT), "matching": List(COUNT)}
DIFFERENCE = {"at": COUNT, "gap": Optional(FIGURE), "is_tie": Switch()}
RECORD = {
    "run": Word(),
    "prompt": COUNT,
    "repeat": Number(int, 0),
    "rank": Absent(COUNT),
    "metrics": Map(FIGURE),
    "token_ids": List(COUNT),
    "predicted_ms": Absent(RATE),
    "depths": Absent(Object(DEPTHS)),
    "calibration": Absent(Object(CALIBRATION)),
    "difference": Absent(Object(DIFFERENCE)),
}
METRICS = {"throughput": Absent(RATE), "peak_mb": Absent(DIVISOR)}  # others are divided by them
RESULTS = {
    "format": SIZE,
    "table": Word(),
    "columns": List(Word()),
    "options": Object({"repeats": Absent(Number(int, 1))}),
    "machine": Object(MACHINE),
    "prompts": Object(PROMPTS),
    "sizes": Object(SIZES),
    "runs": List(Object(RUN)),
    "setup_s": Absent(Map(FIGURE)),
    "step_times": Optional(Object(STEP_TIMES)),
    "records": List(Object(RECORD)),
    "is_memory": Absent(Switch()),
    "shared_by": Absent(List(Object(RANK))),
    "title": Absent(Word()),
}


def check_results(content: object, where: str) -> None:
    """Raise ForeignFile, naming what is wrong, unless this is what a results file says."""
    checked(content, RESULTS, where)
    require_known(content, RESULTS, where)
    for i, run in enumerate(content["runs"]):
        require_known(run, RUN, f"{where}: runs[{i}]")
    for i, record in enumerate(content["records"]):
        checked(record["metrics"], METRICS, f"{where}: records[{i}].metrics")
        check_counts(record, f"{where}: records[{i}]")
    check_labels(content, where)
    check_ranks(content, where)
    times = content.get("step_times")
    if times is not None:
        check_step_times(times, f"{where}: step_times")


def require_known(content: dict, schema: Schema, where: str) -> None:
    """Raise ForeignFile for a key that would be lost when the file is written again."""
    for key in content:
        if key not in schema:
            raise ForeignFile(f"{where} has {key!r}, which is nothing of a results file")


def check_labels(content: dict, where: str) -> None:
    """Raise ForeignFile unless runs have labels of their own, and all else names one of them."""
    labels = [run["label"] for run in content["runs"]]
    known = set(labels)
    if len(known) < len(labels):
        raise ForeignFile(f"{where} has two runs of one label")
    named = [record["run"] for record in content["records"]]
    for run in content["runs"]:
        named += [run["baseline"], run.get("reference") or run["baseline"]]
    for label in named:
        if label not in known:
            raise ForeignFile(f"{where} speaks of {label!r}, which is no run of it")


def check_ranks(content: dict, where: str) -> None:
    """Raise ForeignFile unless records are of ranks that are described."""
    ranks = content.get("shared_by", [])
    for i, rank in enumerate(ranks):
        require_known(rank, RANK, f"{where}: shared_by[{i}]")
    for i, record in enumerate(content["records"]):
        if record.get("rank", -1) >= len(ranks):
            raise ForeignFile(f"{where}: records[{i}] is of a rank that is not described")


def check_counts(record: dict, where: str) -> None:
    """Raise ForeignFile for counts that do not go with each other."""
    for kind in ("depths", "calibration"):
        lists = record.get(kind, {})
        require_equal_lengths(list(lists.values()), f"{where}.{kind}")


def check_step_times(times: dict, where: str) -> None:
    """Raise ForeignFile unless there are times of several rising numbers of rows."""
    require_known(times, STEP_TIMES, where)
    rows = times["rows"]
    require_equal_lengths([rows, times["target_ms"], times["draft_ms"]], where)
    if len(rows) < 2 or sorted(set(rows)) != rows:
        raise ForeignFile(f"{where}.rows do not rise")


def require_equal_lengths(lists: Sequence[list], where: str) -> None:
    if len({len(items) for items in lists}) > 1:
        raise ForeignFile(f"{where} has lists of several lengths")
