"""The numerics of one kernel, a line of JSON for each result: the child of ``benchmarks.numerics``.

``python -m benchmarks.numerics_of_kernel NAME FILE`` appends to the file. Steps that the file
names are not taken again, so the command can go on after a step that ended its process.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fa_verify.probing.command import subject_and_device  # isort: skip  # before torch

import torch

from benchmarks.exact_casts import exact_casts, rounded_once
from fa_verify.adapters.registry import NAMED
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import torch_reference
from fa_verify.probing.answers import Answer
from fa_verify.probing.domain import (
    domain_of,
    smallest,
    with_gradients,
    with_right_results,
    without_mask,
)
from fa_verify.probing.numerics import numerics_of, orders_of
from fa_verify.probing.summation import Sum
from fa_verify.probing.trying import declares, stripped, watched
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.declared import NUMERICS, WORDS
from fa_verify.properties.kernels.fitting import fitted
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import run_subject
from fa_verify.properties.running.watchdog import Watchdog

__all__ = [
    "ALIASES",
    "DTYPES",
    "FAMILIES",
    "HEAD_DIM",
    "SEEDS",
    "SIZE",
    "Steps",
    "accuracy",
    "loaded",
]

# float64 is the oracle's own dtype.
DTYPES = ("bf16", "fp16", "fp32")
# Input families of the accuracy: N(0, 1), scores times 8, and v = |N(0, 1)|, where nothing cancels.
FAMILIES = {"ordinary": "normal", "peaked": "times8", "positive": "positive_v"}
SEEDS = 5
# Rows and keys, or the next multiple that a kernel takes; no multiple of a tile.
SIZE, HEADS, HEAD_DIM = 1000, 2, 64
ALIASES = {"sdpa-flash-cpu": "fa_verify.adapters.sdpa:flash_on_cpu"}
# Evidence is cut after so many characters.
_LONGEST = 240
# The answers about its domain that the experiments on a kernel need.
_DOMAIN = ("backward", "dtypes", "head_dims", "gqa", "m_ne_n", "always_causal", "fixed_scale")


def loaded(name: str) -> tuple[Subject, str]:
    """Returns a kernel with one configuration, and its device.

    Args:
        name: A name of the registry, with "/" and a configuration or without; a file or a module
            with a name, as for ``fa-verify probe``; or an alias of one.

    Raises:
        ValueError: The kernel cannot be loaded or run here.
    """
    head, _, config = name.partition("/")
    if head not in NAMED:
        head, config = name, ""
    subject, device = subject_and_device(ALIASES.get(head, head))
    config = config or next(iter(subject.configs))
    if config not in subject.configs:
        raise ValueError(
            f"{head} has no configuration {config!r}; needs one of {[*subject.configs]}"
        )
    replaced = dict(subject.configs[config])
    call = subject.call
    if len(subject.configs) > 1:
        call = functools.partial(call, config=config)
    own = {word: x for word, x in subject.declarations().items() if word in WORDS}
    own.pop("configs", None)
    one = Subject(name, call, takes=subject.takes, source=subject.source)
    return one.assuming(own | replaced), device


class Steps:
    """The steps of one kernel, and the file that they append to.

    Args:
        subject: The kernel, with its declarations.
        device: "cpu" or "cuda".
        path: The file. It may hold the lines of an earlier process.
    """

    def __init__(self, subject: Subject, device: str, path: Path) -> None:
        self.subject, self.device, self.path = subject, device, path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines]
        self.begun = {record["step"] for record in records if "step" in record}
        # The domain and the sizes that a process found before it ended.
        self.kept: dict[str, Any] = next((x for x in records if "base" in x), {})

    def write(self, **record: Any) -> None:
        """Appends a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def begins(self, step: str) -> bool:
        """Notes that a step begins; False if an earlier process has begun it."""
        if step in self.begun:
            return False
        self.write(step=step)
        return True

    def run(self) -> None:
        """Takes every step."""
        declared = declares(self.subject)
        plain = stripped(self.subject)
        found = self._declared() if declared else self._probed(plain)
        if not found:
            return
        dtypes = tuple(x for x in DTYPES if x in found["dtypes"].value)
        self.write(dtypes=dtypes, declared=self.subject.declared())
        if declared:
            self._measure(self.subject, dtypes)
        base = self._base(plain)
        if base is None:
            return
        found_by_dtype: dict[str, Mapping[str, Answer]] = {}
        for topic, ask in (("numerics", numerics_of), ("orders", orders_of)):
            for dtype in dtypes:
                narrow = {**found, "dtypes": dataclasses.replace(found["dtypes"], value=(dtype,))}
                problem = dataclasses.replace(base, dtype=dtype)
                if self.begins(f"{topic} {dtype}"):
                    found_by_dtype[dtype] = self._ask(ask, plain, problem, narrow, dtype)
            if topic == "numerics" and not declared:
                self._measure(self._assuming(found, found_by_dtype), dtypes)
        self.write(end=True)

    def _declared(self) -> dict[str, Answer]:
        """The domain from the declarations: probing it takes longer than all experiments."""
        values = {word: getattr(self.subject, word) for word in _DOMAIN}
        return {x: Answer(x, y, "shown", "declared") for x, y in values.items()}

    def _probed(self, plain: Subject) -> dict[str, Answer]:
        """The domain of a kernel that declares nothing; empty if it ends the process."""
        if "domain" in self.kept:
            return {x["word"]: _answer(x) for x in self.kept["domain"]}
        if not self.begins("domain"):
            self.write(note="the process ended while the domain was probed")
            return {}
        base = smallest(plain, self.subject, self.device)
        if not isinstance(base, Problem):
            self.write(note=f"it raises on each problem: {base[0].error}")
            return {}
        base = with_gradients(plain, with_right_results(plain, base))
        always_causal, base = without_mask(plain, base)
        answers = (always_causal, *domain_of(plain, self.subject, base))
        found = {answer.word: answer for answer in answers}
        self.kept |= {"base": base.to_json(), "domain": [x.to_record() for x in found.values()]}
        self.write(**self.kept)
        return found

    def _base(self, plain: Subject) -> Problem | None:
        """The problem whose sizes the experiments have."""
        if "base" in self.kept:
            return Problem.from_json(self.kept["base"])
        subject = self.subject
        wanted = Problem(
            M=16, N=16, D=HEAD_DIM, Dv=HEAD_DIM, dtype="bf16", device=self.device,
            mask=Mask(causal=subject.always_causal),
        )  # fmt: skip
        base = fitted(subject, wanted, self.device)
        if base is None:
            self.write(note="no problem fits the declarations")
            return None
        # The kernel is asked without its declarations, and so without a mask.
        base = dataclasses.replace(base, mask=Mask())
        if self.begins("base"):
            base = with_right_results(plain, base)
            base = with_gradients(plain, base) if subject.backward else base
            self.write(base=base.to_json())
        return base

    def _ask(
        self,
        ask: Callable[..., Iterator[Answer | Sum]],
        plain: Subject,
        base: Problem,
        found: dict[str, Answer],
        dtype: str,
    ) -> dict[str, Answer]:
        """Asks for a topic in one dtype, and writes each answer."""
        for one in ask(plain, base, found):
            if isinstance(one, Answer):
                found[one.word] = one
                word = one.word.removesuffix(f"_{dtype}")
                record = dataclasses.replace(one, word=word, evidence=_cut(one.evidence))
                self.write(dtype=dtype, answer=record.to_record())
        return found

    def _assuming(
        self, found: Mapping[str, Answer], by_dtype: Mapping[str, Mapping[str, Answer]]
    ) -> Subject:
        """The kernel with the limits and the casts that were found, in place of declarations."""
        words: dict[str, Any] = {}
        for answers in (found, *by_dtype.values()):
            for word, one in answers.items():
                known = word in WORDS and one.value is not None and one.certainty != "undecided"
                if known and word not in ("dtypes", "masks"):
                    words.setdefault(word, one.value)
        words["dtypes"] = found["dtypes"].value
        masks = found["masks"].value if "masks" in found else ()
        return self.subject.assuming({**words, "masks": masks})

    def _measure(self, subject: Subject, dtypes: Sequence[str]) -> None:
        for dtype in dtypes:
            if self.begins(f"accuracy {dtype}"):
                for family in FAMILIES:
                    try:
                        self.write(
                            dtype=dtype,
                            family=family,
                            **accuracy(subject, family, dtype, self.device),
                        )
                    except Exception as error:
                        said = f"{type(error).__name__}: {error}"
                        self.write(dtype=dtype, family=family, error=_cut(said))


def _answer(record: Mapping[str, Any]) -> Answer:
    """An answer from its record, in which tuples are lists."""
    answer = Answer(**record)
    value = answer.value
    return dataclasses.replace(answer, value=tuple(value) if isinstance(value, list) else value)


def accuracy(subject: Subject, family: str, dtype: str, device: str) -> dict[str, Any]:
    """Returns RMS errors relative to the RMS of each output, by output and seed.

    Args:
        subject: The kernel, with its declarations.
        family: A key of ``FAMILIES``.
        dtype: Dtype of the inputs.
        device: "cpu" or "cuda".

    Returns:
        The sizes under "problem", and under "rms" the errors by output: of the "kernel", of the
        float64 result that is "rounded" once, and of the "casts" of ``exact_casts``. Outputs that
        the kernel does not return are left out.

    Raises:
        NotImplementedError: The kernel's declarations leave no such problem.
    """
    wanted = Problem(
        H=HEADS, Hk=HEADS, M=SIZE, N=SIZE, D=HEAD_DIM, Dv=HEAD_DIM, dtype=dtype,
        inputs=FAMILIES[family], mask=Mask(causal=subject.always_causal), device=device,
    )  # fmt: skip
    problem = fitted(subject, wanted, device)
    if problem is None or problem.dtype != dtype or problem.inputs != FAMILIES[family]:
        raise NotImplementedError("the declarations leave no such problem")
    rms: dict[str, dict[str, list[float]]] = {}
    for seed in range(SEEDS):
        one = dataclasses.replace(problem, seed=seed)
        inputs = make(one)
        want = torch_reference.attention(*inputs[:4], mask=one.mask, sm_scale=one.scale)
        numerics = subject.numerics_of(one)
        results: dict[str, Outputs[Any]] = {
            "kernel": run_subject(subject, one, inputs),
            "rounded": rounded_once(want, dtype),
            "casts": exact_casts(one, inputs, numerics),
        }
        for name in OUTPUTS:
            if getattr(results["kernel"], name) is None:
                continue
            true = getattr(want, name)
            for what, outputs in results.items():
                error = _rms(getattr(outputs, name).double() - true) / _rms(true)
                of_output = rms.setdefault(name, {})
                of_output.setdefault(what, []).append(float(f"{error:.4g}"))
    sizes = {x: getattr(problem, x) for x in ("B", "H", "M", "N", "D")}
    declared = {x: getattr(numerics, x) for x in NUMERICS if x in subject.declarations()}
    return {"problem": {**sizes, "causal": problem.mask.causal}, "casts": declared, "rms": rms}


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def _cut(text: str) -> str:
    """Shortens evidence to one line."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def main(arguments: Sequence[str]) -> int:
    """Returns 0, or 2 if the kernel cannot be loaded or run here."""
    name, file, seconds = arguments
    # As under fa-verify probe, where files of kernels may choose other configurations.
    os.environ.setdefault("PYTEST_VERSION", "numerics")
    torch.set_num_threads(1)
    path = Path(file)
    try:
        subject, device = loaded(name)
    except ValueError as error:
        Steps(Subject(name, print), "cpu", path).write(note=f"not run: {_cut(str(error))}")
        return 2
    watchdog = Watchdog(path.with_suffix(".record"), float(seconds), kernel=name)
    try:
        with watched(watchdog.watching):
            Steps(subject, device, path).run()
    finally:
        watchdog.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
