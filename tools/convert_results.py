"""Write results files of format 4 (.json) as files of format 5 (.jsonl), once.

python tools/convert_results.py results/*.json
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.cases import Case, reference_of
from benchmark.columns import RENAMED
from benchmark.hf import NOT_TOLD
from benchmark.results import CASE, FORMAT, digest_of, load

METRICS = RENAMED | {"floor_mb": "weights_and_caches_mb", "context_mb": "cuda_context_mb"}
TABLES = {"counted": "calibration"}
COLUMNS = ("spread",)  # gone
SKIPPED = ("methods", "peers", "unfetched", "table")


def convert(old: dict) -> list[dict]:
    runs = {run["label"]: run for run in old["runs"]}
    cases = {label: case_of(run) for label, run in runs.items()}
    options = {"table": TABLES.get(old["table"], old["table"])}
    options |= {
        k: v for k, v in old["options"].items() if k not in SKIPPED and v not in (None, False)
    }
    if old["options"].get("methods"):
        options["methods"] = old["options"]["methods"]
    if old["options"].get("peers"):
        options["hf"] = True
    head = {
        "format": FORMAT,
        "table": options["table"],
        "title": old["title"],
        "columns": [RENAMED.get(name, name) for name in old["columns"] if name not in COLUMNS],
        "options": options,
        "unfetched": old["options"].get("unfetched", []),
        "machine": old["machine"],
        "load_before": old["load_before"],
        "n_prompts": {next((r["dataset"] for r in old["runs"]), "builtin"): old["prompts"]["n"]},
        "prompts": old["prompts"]["dataset"],
        "prompts_sha256": old["prompts"]["sha256"],
        "cases": [asdict(case) for case in cases.values()],
    }
    assert len({run["dataset"] for run in old["runs"]}) < 2
    lines = [{"head": head}]
    if old["step_times"]:
        lines.append({"step_times": old["step_times"]})
    known = set()
    for record in old["records"]:
        lines.append(text_of(record, runs[record["run"]], cases[record["run"]], old, known))
        assert "difference" not in record
    return lines


def case_of(run: dict) -> Case:
    names = ("row", "dataset", "prompt_tokens", "new_tokens", "temperature", "draft_temperature")
    case = Case(**{name: run[name] for name in (*names, "is_drawn", "published")})
    return Case(**(asdict(case) | {"reference": reference_of(case.row)}))


def text_of(record: dict, run: dict, case: Case, old: dict, known: set) -> dict:
    text = dict(zip(CASE, case.key)) | {"prompt": record["prompt"], "round": record["repeat"]}
    for name, value in record["metrics"].items():
        name = METRICS.get(name, name)
        if name == "new_tokens":
            assert value == case.new_tokens
        elif not (case.is_hf and name in NOT_TOLD):
            text[name] = value
    for name in ("depths", "calibration", "predicted_ms"):
        if name in record:
            text[name] = record[name]
    if "calibration" in text:
        found = text["calibration"]
        text["calibration"] = {"drafted": found["drafted"], "top1_match": found["matching"]}
    if run["label"] in old["setup_s"]:
        text["setup_s"] = old["setup_s"][run["label"]]
    if not case.temperature:
        ids = old["token_ids"][record["ids_at"]]
        digest = digest_of(ids)
        text |= {"ids_digest": digest} | ({} if digest in known else {"ids": ids})
        known.add(digest)
    return text


for name in sys.argv[1:]:
    lines = convert(json.loads(Path(name).read_text()))
    file = Path(name.replace("counted", "calibration")).with_suffix(".jsonl")
    file.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    assert not load(file).n_lacking, file
    print(file, Path(name).stat().st_size, file.stat().st_size)
