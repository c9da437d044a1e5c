"""The results of ``benchmarks.numerics`` as tables in Markdown."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import markdown

__all__ = ["FORWARD", "REFERENCES", "SUMS", "TABLES", "label", "report"]

Record = Mapping[str, Any]
# Columns: the word of an answer, and the head.
FORWARD = {
    "block_n": "tile", "tile_order": "tile order", "splits": "splits",
    "rescale_threshold": "rescale", "prescaling": "prescaled", "p_dtype_of_out": "P",
    "p_normalised": "P normalised first", "l_from": "l adds P",
}  # fmt: skip
BACKWARD = {
    "p_dtype_of_dv": "P of dV", "dp_dtype": "dP", "ds_dtype": "dS", "ds_scaled": "dS scaled first",
    "ds_from": "dS from P", "delta_from": "delta from", "group_sum": "group sum",
    "backward_reads": "reads",
}  # fmt: skip
SUMS = {
    "accumulation": "additions", "flushes": "below 2^-126", "order_of_out": "sum of out",
    "order_of_dq": "sum of dq", "order_of_dk": "sum of dk", "order_of_dv": "sum of dv",
}  # fmt: skip
FP32 = {
    "q_operand": "q of S", "k_operand": "k of S", "v_operand": "v of out",
    "dout_operand": "dout of dV", "q_operand_of_dk": "q of dK", "k_operand_of_dq": "k of dQ",
    "l_order": "l",
}  # fmt: skip
NARROW = ("bf16", "fp16")
_SHOWN = (
    ("forward", FORWARD, NARROW), ("backward", BACKWARD, NARROW), ("sums", SUMS, NARROW),
    ("operands, fp32", FP32, ("fp32",)), ("sums, fp32", SUMS, ("fp32",)),
)  # fmt: skip
# FlashAttention-2, with which others are compared: on a GPU, and on a CPU.
REFERENCES = ("sdpa-flash", "sdpa-flash-cpu")
_OUTPUTS = ("out", "lse", "dq", "dk", "dv")
_TOPIC = {word: "orders" for word in SUMS if word.startswith("order_of_")}
_UNDECIDED, _NO_CAST = "undecided", "no cast"
# Properties of a cast, and the answer that says whether there is one.
_OF_CAST = {"p_normalised": "p_dtype_of_out", "ds_scaled": "ds_dtype", "ds_from": "ds_dtype"}
# Columns that a cell names; more are counted.
_MOST_NAMED = 6
# Terms of the sums that show an order in fp16; twice as many in other dtypes.
_TERMS_OF_FP16 = 128
_WORDS = {
    ("p_dtype_of_out", "input"): "cast", ("p_dtype_of_dv", "input"): "cast",
    ("ds_dtype", "input"): "cast", ("dp_dtype", "input"): "cast",
    ("group_sum", "dtype"): "16 bits",
    ("flushes", True): "flushed", ("flushes", False): "kept",
    ("rescale_threshold", 0.0): "each rise",
}  # fmt: skip


def label(name: str) -> str:
    """Returns a short name: of a file, its stem."""
    path, colon, function = name.rpartition(":")
    if not colon:
        return name
    stem = Path(path).stem
    return stem if function == "attention" else f"{stem}:{function}"


def state(record: Record) -> list[str]:
    """Returns lines that say where the results come from, and which kernels are incomplete."""
    found = ", ".join(f"{name} {x}" for name, x in record["versions"].items())
    said = [
        f"Measured on {record['device']}; {found}. {len(record['kernels'])} kernels had "
        f"{record['seconds']:g} s in {record['workers']} processes."
    ]
    rows = [
        (label(name), f"`{_cell_text(of['state'])}`", ". ".join(_missing(of)) or "nothing")
        for name, of in _kernels(record)
        if of["state"] != "done" or any(x["missing"] for x in of["dtypes"].values())
    ]
    return [*said, "", *markdown(("kernel", "state", "missing"), rows)] if rows else said


def _missing(of: Record) -> Iterator[str]:
    if not of["dtypes"]:
        yield "everything"
    for dtype, one in of["dtypes"].items():
        for topic, why in one["missing"].items():
            yield f"{topic} in {dtype}: `{_cell_text(why)}`"


def properties(
    record: Record, columns: Mapping[str, str], dtypes: Sequence[str] = NARROW
) -> list[str]:
    """Returns a line for each kernel with its answers; two where the dtypes differ."""
    rows = []
    for name, of in _kernels(record):
        if not any(dtype in of["dtypes"] for dtype in dtypes):
            if not of["dtypes"]:
                rows.append((label(name), *(_short(of["state"]) for _ in columns)))
            continue
        rows.append((label(name), *(_cell(of, word, dtypes) for word in columns)))
    if not rows:
        return [f"No kernel was asked in {' or '.join(dtypes)}."]
    return markdown(("kernel", *columns.values()), rows)


def _cell(of: Record, word: str, dtypes: Sequence[str]) -> str:
    """The answers of all dtypes, once if they agree."""
    found = {dtype: _value(of["dtypes"][dtype], word) for dtype in dtypes if dtype in of["dtypes"]}
    if word == "flushes" and len(found) > 1:
        del found["fp16"]  # it holds no number below 2^-126
    if len({*found.values()}) == 1:
        return next(iter(found.values()))
    if word in _TOPIC and {*found} == {*NARROW} and _same_blocks(*found.values()):
        return found["bf16"]
    return "; ".join(f"{dtype}: {x}" for dtype, x in found.items())


def _value(of: Record, word: str) -> str:
    """An answer in a few words; why there is none, if there is none."""
    answer = of["answers"].get(word)
    if answer is None:
        return _short(of["missing"].get(_TOPIC.get(word, "numerics"), "not asked"))
    if word.startswith("order_of_"):
        return _steps(answer)
    value = answer["value"]
    if answer["certainty"] == _UNDECIDED:
        cast = of["answers"].get(_OF_CAST.get(word, ""), {})
        return _NO_CAST if cast.get("value") == "fp32" else _UNDECIDED
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    if (word, value) in _WORDS:
        return _WORDS[word, value]
    if word == "rescale_threshold":
        return f"2^{value:g}"
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _steps(answer: Record) -> str:
    """The order of a sum: the widths of its blocks, from the outermost to the innermost."""
    said = answer["evidence"].removeprefix("no equal blocks: ")
    if answer["certainty"] == _UNDECIDED and said == answer["evidence"]:
        return _UNDECIDED
    parts = []
    for part in said.split("; each of "):
        part = re.sub(r" (?:keys|rows)\b", "", part)
        part = re.sub(r"^\d+ blocks of (\d+), ", r"\1 ", part)
        part = re.sub(r"^\d+ one by one, ", "1 ", part)
        parts.append(part.removesuffix(" in order").rstrip(","))
    return " > ".join(parts)


def _same_blocks(bf16: str, fp16: str) -> bool:
    """Whether the orders differ in wide blocks alone: the terms of an fp16 sum are fewer."""
    first, _, rest = bf16.partition(" > ")
    return first.isdecimal() and int(first) >= _TERMS_OF_FP16 and rest == fp16


def _short(why: str) -> str:
    """A reason in a few words."""
    return "ended" if why.startswith("ended") else why if len(why) < 12 else "not run"


def _kernels(record: Record) -> list[tuple[str, Record]]:
    """The kernels by name, FlashAttention-2 first."""
    first = _reference(record)
    return sorted(record["kernels"].items(), key=lambda x: x[0] != first)


def _reference(record: Record) -> str | None:
    """The name of FlashAttention-2 among the kernels; None without it."""
    return next((x for x in REFERENCES if x in record["kernels"]), None)


def differences(record: Record, dtype: str = "bf16") -> list[str]:
    """Returns a line for each kernel: the answers that differ from FlashAttention-2's."""
    name = _reference(record)
    of_reference = record["kernels"][name]["dtypes"].get(dtype) if name else None
    if of_reference is None:
        return ["FlashAttention-2 was not among the kernels."]
    rows = []
    columns = FORWARD | BACKWARD | SUMS
    for other, of in _kernels(record):
        if other == name or dtype not in of["dtypes"]:
            continue
        apart, open_ = [], []
        for word, head in columns.items():
            mine, theirs = (_value(x, word) for x in (of["dtypes"][dtype], of_reference))
            if not _is_known(mine) or not _is_known(theirs):
                open_.append(head)
            elif mine != theirs and _NO_CAST not in (mine, theirs):
                apart.append(f"{head}: {mine}, not {theirs}")
        many = f"{len(open_)} of {len(columns)} columns"
        rest = many if len(open_) > _MOST_NAMED else ", ".join(open_) or "nothing"
        errors = _errors_beside(of["dtypes"][dtype], of_reference)
        rows.append((label(other), ". ".join(apart) or "nothing", errors, rest))
    head = ("kernel", f"differs from {label(name or '')}", "error / its error", "not compared")
    return markdown(head, rows)


def _errors_beside(of: Record, of_reference: Record) -> str:
    """The RMS errors on ordinary data, divided by those of the reference."""
    found, beside = (x["accuracy"].get("ordinary", {}).get("rms", {}) for x in (of, of_reference))
    ratios = [
        f"{name} {statistics.mean(found[name]['kernel']) / statistics.mean(x['kernel']):.2f}"
        for name, x in beside.items()
        if name in found
    ]
    return ", ".join(ratios) or "not measured"


def _is_known(cell: str) -> bool:
    return cell not in (_UNDECIDED, "not asked", "no time", "ended", "not run")


def accuracy(record: Record, dtype: str) -> list[str]:
    """Returns a line for each family and kernel: errors in units of one rounding of each output."""
    rows: list[tuple[str, ...]] = []
    if not any(dtype in of["dtypes"] for of in record["kernels"].values()):
        return [f"No kernel was asked in {dtype}."]
    for family in record["accuracy"]["families"]:
        of_family = {
            name: of["dtypes"][dtype] for name, of in _kernels(record) if dtype in of["dtypes"]
        }
        best: dict[str, str] = {}
        lines = []
        for name, of in of_family.items():
            found = of["accuracy"].get(family, {})
            missing = (
                "error" if "error" in found else _short(of["missing"].get("accuracy", "no time"))
            )
            cells = []
            for output in _OUTPUTS:
                errors = found.get("rms", {}).get(output)
                if errors is None:
                    cells.append("not returned" if "rms" in found else missing)
                    continue
                once = f"{statistics.mean(errors['rounded']):.2e}"
                # A kernel that takes one row, or is causal, has problems of its own.
                if found["problem"]["M"] > 1 and not found["problem"]["causal"]:
                    best.setdefault(output, once)
                cells.append(_relative(errors))
            lines.append((family, label(name), *cells))
        head = tuple(best.get(output, "not measured") for output in _OUTPUTS)
        rows += [(family, "*one rounding, RMS*", *head), *lines]
    return markdown(("data", "kernel", *_OUTPUTS), rows)


def _relative(errors: Mapping[str, Sequence[float]]) -> str:
    """The kernel's error in roundings, half of its spread over the seeds, and that of the casts."""
    kernel = [x / y for x, y in zip(errors["kernel"], errors["rounded"], strict=True)]
    casts = [x / y for x, y in zip(errors["casts"], errors["rounded"], strict=True)]
    spread = (max(kernel) - min(kernel)) / 2
    return f"{statistics.mean(kernel):.3g} ± {spread:.1g} ({statistics.mean(casts):.3g})"


def evidence(record: Record) -> list[str]:
    """Returns a line for each answer about FlashAttention-2: its evidence, and the replay."""
    name = _reference(record)
    rows = []
    of = record["kernels"][name] if name else {"dtypes": {}}
    for dtype, words in (("bf16", FORWARD | BACKWARD | SUMS), ("fp32", FP32)):
        for word, head in words.items():
            answer = of["dtypes"].get(dtype, {"answers": {}})["answers"].get(word)
            if answer is None:
                continue
            replay = f"`{answer['replay']}`" if answer["replay"] else "none"
            value = _value(of["dtypes"][dtype], word)
            rows.append((dtype, head, value, f"`{_cell_text(answer['evidence'])}`", replay))
    return markdown(("dtype", "column", "answer", "evidence", "replay"), rows)


def undecided(record: Record) -> list[str]:
    """Returns a line for each table and reason for undecided answers, with columns and kernels."""
    found: dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]] = {}
    for title, columns, dtypes in _SHOWN:
        for name, of in _kernels(record):
            for dtype in dtypes:
                one = of["dtypes"].get(dtype, {"answers": {}})
                for word, head in columns.items():
                    # fp16 holds no number below 2^-126.
                    if word not in one["answers"] or (word, dtype) == ("flushes", "fp16"):
                        continue
                    if _value(one, word) == _UNDECIDED:
                        reason = title, _reason(one["answers"][word]["evidence"])
                        heads, names = found.setdefault(reason, ({}, {}))
                        heads[head] = None
                        names[label(name)] = None
    rows = [(*key, ", ".join(heads), ", ".join(names)) for key, (heads, names) in found.items()]
    return markdown(("table", "reason", "columns", "kernels"), rows)


def _reason(text: str) -> str:
    """The reason without the numbers of one kernel."""
    text = re.sub(r": got .*", "", text)
    text = re.sub(r"terms \(.*", "some counts are those of no tree", text)
    text = re.sub(r"\d+ terms are joined.*", "some counts are those of no tree", text)
    text = re.sub(r"(explained by) .* and by .*", r"\1 several answers", text)
    return f"`{_cell_text(text)}`"


def _cell_text(text: str) -> str:
    """A text that ends neither a cell nor a code span."""
    return text.replace("|", r"\|").replace("`", "'")


TABLES: Mapping[str, Callable[[Record], list[str]]] = {
    "run": state,
    "differences": differences,
    "forward": lambda x: properties(x, FORWARD),
    "backward": lambda x: properties(x, BACKWARD),
    "sums": lambda x: properties(x, SUMS),
    "operands-fp32": lambda x: properties(x, FP32, ("fp32",)),
    "sums-fp32": lambda x: properties(x, SUMS, ("fp32",)),
    "errors-bf16": lambda x: accuracy(x, "bf16"),
    "errors-fp16": lambda x: accuracy(x, "fp16"),
    "errors-fp32": lambda x: accuracy(x, "fp32"),
    "undecided": undecided,
    "evidence": evidence,
}


def report(record: Record) -> list[str]:
    """Returns every table but the evidence, for a terminal."""
    asked = (name for name in TABLES if name != "evidence")
    return [line for name in asked for line in ("", name, "", *TABLES[name](record))]
