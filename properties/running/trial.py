"""Run one problem through a subject and the oracle, and collect the results for the checks."""

from __future__ import annotations

import dataclasses
import math
import signal
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fa_verify.oracles.bounds import error_model
from fa_verify.oracles.bounds.error_model import Judgement
from fa_verify.oracles.bounds.variance import Variances, variances
from fa_verify.oracles.calls.quantised import QuantisedProblem
from fa_verify.oracles.guarantee import EXCEPTION, FORM, INPUTS
from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import torch_reference
from fa_verify.oracles.reference.merging import Merged
from fa_verify.properties.inputs.caches import CacheInputs, UnchangedInputs
from fa_verify.properties.inputs.quantised import QuantisedInputs
from fa_verify.properties.inputs.sampling import TORCH_DTYPES
from fa_verify.properties.inputs.states import States
from fa_verify.properties.inputs.tensors import Inputs, make
from fa_verify.properties.kernels.refusals import CannotRunError, NoRoomError, RefusedError
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.without_gpu import CANNOT_RUN, advice, asks_for_a_gpu
from fa_verify.properties.running.guard_bands import GuardBands
from fa_verify.properties.running.large_memory import no_room
from fa_verify.properties.running.ratios import largest_ratios
from fa_verify.properties.running.settings import changed_settings

__all__ = [
    "AttentionTrial",
    "ChangedInputError",
    "ChangedSettingsError",
    "GradientRun",
    "Judged",
    "OpenCall",
    "OutOfRangeError",
    "PlannedRun",
    "SubjectError",
    "Trial",
    "WrongFormError",
    "attention_call",
    "cache_call",
    "faults_of_the_subject",
    "kept_settings",
    "merge_call",
    "plan_in_range",
    "plan_run",
    "quantised_call",
    "run_gradient",
    "run_gradients",
    "run_kvcache",
    "run_pooled",
    "run_states",
    "run_subject",
    "run_trial",
    "running",
]

_SUITE = Path(__file__).parents[2]
_LIBRARIES = (
    str(_SUITE / "properties"),
    str(_SUITE / "simulator"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("stdlib"),
)


class Judged(NamedTuple):
    """An output of a kernel beside the true values and their bound, all of one shape."""

    got: torch.Tensor
    want: torch.Tensor
    bound: torch.Tensor


@dataclass(frozen=True)
class Trial:
    """A run of a kernel on a call of any kind, with the oracle's outputs and bounds.

    Args:
        subject: The kernel with its declarations.
        problem: The call.
        inputs: The tensors of the call, as its kind makes them.
        asked: The guarantees, or parts of them, that checks have asked for: why one is not
            applicable to the call, or an empty text.
    """

    subject: Subject
    problem: Any
    inputs: Any
    asked: dict[str, str] = field(default_factory=dict, compare=False, repr=False, kw_only=True)

    @property
    def outputs(self) -> Mapping[str, Judged]:
        """The outputs that are held to a bound, by name."""
        raise NotImplementedError

    def applies(self, guarantee: str) -> None:
        """Note that a guarantee, or a part of it, was checked."""
        self.asked[guarantee] = ""

    def not_applicable(self, guarantee: str, why: str) -> None:
        """Note why a guarantee, or a part of it, says nothing about the call."""
        self.asked.setdefault(guarantee, f"not applicable {why}")

    @cached_property
    @torch.inference_mode()
    def peaks(self) -> list[dict[str, float]]:
        """The worst error/bound of each output, for each call of a batch of calls."""
        outputs, count = self.outputs, max(1, len(self.problem.seeds))
        of_outputs = largest_ratios([*outputs.values()], count)
        return [
            dict(zip(outputs, numbers, strict=True)) for numbers in zip(*of_outputs, strict=True)
        ]

    def inside(self, *names: str) -> bool:
        """Return whether all elements of some outputs lie within the bound."""
        return all(part.get(name, 0.0) <= 1 for part in self.peaks for name in names)


@dataclass(frozen=True)
class AttentionTrial(Trial):
    """A run on a ``Problem``.

    Args:
        problem: The problem.
        inputs: The input tensors.
        got: The kernel's outputs, detached; None for outputs that it does not return.
        want: The outputs of the float64 oracle.
        judgement: Bound, sums of |terms| and range of the problem.
    """

    problem: Problem
    inputs: Inputs
    got: Outputs[torch.Tensor | None]
    want: Outputs[torch.Tensor]
    judgement: Judgement

    @property
    def outputs(self) -> Mapping[str, Judged]:
        """The outputs that the kernel returned."""
        judged = zip(OUTPUTS, self.got, self.want, self.judgement.bound, strict=True)
        return {
            name: Judged(got, want, bound) for name, got, want, bound in judged if got is not None
        }

    @cached_property
    def variances(self) -> Variances:
        """Predicted variances of the outputs' errors for independent roundings."""
        return variances(
            *self.inputs,
            mask=self.problem.mask,
            sm_scale=self.problem.scale,
            in_dtype=self.problem.dtype,
            numerics=self.subject.numerics_of(self.problem),
            softcap=self.problem.softcap,
        )


class SubjectError(Exception):
    """The subject raised an exception that is no refusal, or returned no valid result.

    Args:
        message: Description of the fault.
        forward: The outputs of the forward, if the fault lies in the backward.

    Attributes:
        guarantee: See ``Finding``.
        claim: See ``Finding``.
        trial: The run without the gradients, if the fault lies in the backward of a planned run.
    """

    guarantee: str = EXCEPTION
    claim = "returns no valid result; needs one, or NotImplementedError as a refusal"

    def __init__(self, message: str, forward: Outputs[torch.Tensor | None] | None = None) -> None:
        super().__init__(message)
        self.forward = forward
        self.trial: AttentionTrial | None = None


class OutOfRangeError(ValueError):
    """A range condition fails, so that a correct kernel may fail."""


class WrongFormError(SubjectError):
    """An output has a wrong type, shape or dtype."""

    guarantee = FORM
    claim = "returns an output of a wrong type, shape or dtype"


class ChangedInputError(SubjectError):
    """The subject wrote to an input."""

    guarantee = INPUTS
    claim = "changes its inputs in place; needs to leave them as they are"


class ChangedSettingsError(SubjectError):
    """The subject changed a global setting of PyTorch, which is restored."""

    guarantee = INPUTS
    claim = "changes global settings of PyTorch; needs to leave them as they are"


@contextmanager
def kept_settings() -> Iterator[None]:
    """Restore the global settings of PyTorch after a call.

    Raises:
        ChangedSettingsError: The block changed one. It names an exception of the block too.
    """
    raised: Exception | None = None
    with changed_settings() as changed:
        try:
            yield
        except Exception as error:
            raised = error
    if changed:
        then = [f"and raises {_told(raised)}"] if raised is not None else []
        told = "\n".join([*(f"it changes {x}" for x in changed), *then])
        raise ChangedSettingsError(told) from raised
    if raised is not None:
        raise raised


@contextmanager
def _poisoned_allocations() -> Iterator[None]:
    """Make ``torch.empty`` return NaN inside the block, so that unwritten elements are detected.

    The block calls a kernel, which has to keep the settings of PyTorch.

    PyTorch fills new memory only in deterministic mode. The mode is set to "warn", so that a
    library still runs its default algorithms; the warnings are ignored.
    """
    fill: Any = torch.utils.deterministic  # the attribute is missing in the stubs
    mode = torch.get_deterministic_debug_mode()
    fills = fill.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    fill.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with kept_settings():
                yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        fill.fill_uninitialized_memory = fills


def _check_form(name: str, got: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Check the type, shape and dtype of an output, which comparisons of values do not cover.

    Raises:
        WrongFormError: One is wrong. A subclass of torch.Tensor may compute comparisons itself.
            lse and pooled probabilities are float64 for float64 inputs and float32 otherwise; other
            outputs have the dtype of the inputs.
    """
    if type(got) is not torch.Tensor:
        raise WrongFormError(f"{name} is a {type(got).__name__}; needs a torch.Tensor")
    dtype = like.dtype
    if name in ("lse", "pooled"):
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
    if tuple(got.shape) != shape or got.dtype != dtype:
        raise WrongFormError(
            f"{name} has shape {tuple(got.shape)} and dtype {got.dtype}; needs {shape} and {dtype} "
            f"for inputs of {like.dtype}"
        )


def run_subject(
    subject: Subject, problem: Problem, inputs: Inputs, *, asynchronous: bool = False
) -> Outputs[torch.Tensor | None]:
    """Run forward and backward, with uninitialised memory filled with NaN.

    Args:
        subject: The subject.
        problem: The problem.
        inputs: Its inputs.
        asynchronous: Do not wait for the GPU, as in a CUDA graph's capture. Inputs that the call
            changes are not noticed then.

    Raises:
        SubjectError: The subject raises, changes an input, or an output has a wrong shape or dtype.
        RefusedError: The subject refuses the problem.
    """
    if asynchronous:
        with _exceptions_of_the_subject():
            return _run(subject, problem, inputs)
    with faults_of_the_subject(inputs):
        return _run(subject, problem, inputs)


class GradientRun(NamedTuple):
    """One gradient, and the results of the forward that came before it."""

    out: torch.Tensor
    lse: torch.Tensor | None
    gradient: torch.Tensor


def run_gradient(subject: Subject, problem: Problem, inputs: Inputs, name: str) -> GradientRun:
    """Return "dbias" or "dsinks", for the same loss as in ``run_subject``.

    Raises:
        SubjectError: The subject raises, or the gradient's shape or dtype is not its tensor's.
        RefusedError: The subject refuses the problem.
    """
    found = _run_gradients(subject, problem, inputs, (name,))
    return GradientRun(found["out"], found.get("lse"), found[name])


def run_gradients(
    subject: Subject, problem: Problem, inputs: Inputs, wanted: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return some gradients, out of "dq", "dk", "dv", "dbias" and "dsinks"; of no other input.

    Raises:
        SubjectError: The subject raises, or a gradient is missing or has a wrong shape or dtype.
        RefusedError: The subject refuses the problem.
    """
    found = _run_gradients(subject, problem, inputs, wanted)
    return {name: found[name] for name in wanted}


def run_pooled(
    subject: Subject, problem: Problem, inputs: Inputs, pool: str, size: tuple[int, int]
) -> torch.Tensor:
    """Return the subject's pooled probabilities, with uninitialised memory filled with NaN.

    Args:
        subject: The subject.
        problem: The problem.
        inputs: Its tensors.
        pool: "mean" or "max".
        size: Rows and keys of a block.

    Returns:
        A tensor of shape (B, H, ceil(M / size[0]), ceil(N / size[1])).

    Raises:
        SubjectError: The subject raises, or the result has a wrong shape or dtype.
        RefusedError: The subject refuses the problem, or does not support pooling.
    """
    q, k, v = inputs[:3]
    shape = (*q.shape[:2], -(-problem.M // size[0]), -(-problem.N // size[1]))
    with faults_of_the_subject(inputs):
        with _poisoned_allocations():
            pooled = subject.run_pooled(q, k, v, problem, pool, size)
        _check_form("pooled", pooled, q, shape)
        return pooled.detach()


def run_states(subject: Subject, states: States, *, gradients: bool) -> Merged:
    """Return a merge by the subject, with uninitialised memory filled with NaN.

    Args:
        subject: The subject.
        states: The tensors, with lses in the convention of the subject.
        gradients: Whether to compute the gradients too; without them, they have no elements.

    Raises:
        SubjectError: The subject raises, changes an input, or an output has a wrong shape or dtype.
        RefusedError: The subject refuses the call, or does not merge states.
    """
    # Nothing depends on parts without elements.
    wanted = ("douts", "dlses") if gradients and states.outs.numel() else ()
    with running(states):
        got = merge_call(subject, states, wanted).backward()
    absent = [got.get(name, states.outs.new_empty(0)) for name in ("douts", "dlses")]
    return Merged(got["out"], got["lse"], *absent)


def run_kvcache(
    subject: Subject, problem: Problem, x: CacheInputs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and lse of a call with a cache, which it may write to.

    Args:
        subject: The subject.
        problem: The attention, whose sizes ``x`` can have in part. Its mask gives the window.
        x: The tensors.

    Raises:
        SubjectError: The subject raises, changes another input, or an output has a wrong shape or
            dtype.
        RefusedError: The subject refuses the call, or attends to no cache.
    """
    with running(x.without_caches):
        got = cache_call(subject, problem, x).forward
    return got["out"], got.get("lse")


# Elements of the inputs that are copied to be compared after a call. More would take gigabytes.
_MOST_COMPARED = 2**28


@contextmanager
def faults_of_the_subject(
    inputs: Inputs | States | UnchangedInputs | QuantisedInputs,
) -> Iterator[None]:
    """Convert exceptions inside the block to SubjectError, NotImplementedError to RefusedError.

    Raises:
        ChangedInputError: The block changes a bit of an input.
    """
    given = {name: x for name, x in inputs._asdict().items() if x is not None}
    if sum(x.numel() for x in given.values()) > _MOST_COMPARED:
        given = {}
    before = [x.clone(memory_format=torch.contiguous_format) for x in given.values()]
    with _exceptions_of_the_subject():
        yield
    if not given:
        return
    changed = [
        (_bits(x) != _bits(old)).sum() for x, old in zip(given.values(), before, strict=True)
    ]
    # Synchronise with the GPU once for all inputs.
    counts = torch.stack(changed).tolist()
    if any(counts):
        raise ChangedInputError(
            "\n".join(
                f"{name} differs from its value before the call in {count:,} of "
                f"{x.numel():,} elements"
                for (name, x), count in zip(given.items(), counts, strict=True)
                if count
            )
        )


@contextmanager
def _exceptions_of_the_subject(
    forward: Outputs[torch.Tensor | None] | None = None,
) -> Iterator[None]:
    """Convert exceptions to RefusedError and SubjectError; add forward's outputs.

    A KeyboardInterrupt is converted unless a signal raises it.
    """
    with _interrupts() as interrupts:
        try:
            yield
        except NotImplementedError as error:
            raise _refusal(error) from error
        except SubjectError as error:
            error.forward = error.forward or forward
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if reason := no_room(error):
                raise NoRoomError(reason) from error
            if reason := asks_for_a_gpu(error):
                raise CannotRunError(f"{CANNOT_RUN}{reason}") from error
            if interrupts:
                raise KeyboardInterrupt from error
            raise SubjectError(_told(error), forward) from error


def _refusal(error: NotImplementedError) -> RefusedError:
    if isinstance(error, RefusedError):
        return error
    # The simulator, which imports nothing of this package, says so in the message alone.
    of_machine = str(error).startswith(CANNOT_RUN)
    return CannotRunError(*error.args) if of_machine else RefusedError(*error.args)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collect the interrupts that the process receives in the block, and handle them as before."""
    received: list[int] = []
    before: Any = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: object) -> None:
        received.append(number)
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of floats as integers, so that NaN equals itself."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _run_gradients(
    subject: Subject, problem: Problem, inputs: Inputs, wanted: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return out, lse if there is one, and the wanted gradients by name."""
    with running(inputs):
        return attention_call(subject, problem, inputs, wanted).backward()


def _added(inputs: Inputs) -> dict[str, torch.Tensor | None]:
    """Return the tensors of score modifications, by the names of the call's arguments."""
    return {name: getattr(inputs, name) for name in ("alibi_slopes", "bias", "sinks")}


def _told(error: BaseException) -> str:
    """Describe an exception with the innermost line of code outside of libraries."""
    # Triton's InterpreterError wraps the exception of the kernel.
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    # Its CompilationErrors point from one called function into the next. The last has the reason.
    reason = error
    while reason.__cause__ is not None and type(reason.__cause__) is type(error):
        reason = reason.__cause__
    text = f"{type(error).__name__}: {reason}" if str(reason) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    frame = (own or frames)[-1]
    if frame.filename.startswith(_LIBRARIES[0]):  # the suite itself found the fault
        return text
    told = (text, f"({frame.filename}, line {frame.lineno})", advice(error))
    return "\n".join(filter(None, told))


Through = Callable[[Callable[[], Any]], Any]


def _directly(call: Callable[[], Any]) -> Any:
    return call()


@dataclass(frozen=True)
class OpenCall:
    """A forward whose backward is called later, or more than once.

    Args:
        results: The results of the forward, by name.
        gradients: Returns the gradients by name; None without a backward.
    """

    results: Mapping[str, torch.Tensor]
    gradients: Callable[[bool], dict[str, torch.Tensor]] | None

    @property
    def forward(self) -> dict[str, torch.Tensor]:
        """The results of the forward, as they are now."""
        return {name: x.detach() for name, x in self.results.items()}

    def backward(self, *, retain_graph: bool = False) -> dict[str, torch.Tensor]:
        """Run the backward, if there is one; return its gradients and ``forward`` after it."""
        gradients = {} if self.gradients is None else self.gradients(retain_graph)
        return {**gradients, **self.forward}


def attention_call(
    subject: Subject,
    problem: Problem,
    inputs: Inputs,
    wanted: Sequence[str],
    through: Through = _directly,
) -> OpenCall:
    """Run the forward of attention, inside of ``running``.

    Args:
        subject: The subject.
        problem: The problem.
        inputs: Its inputs.
        wanted: The gradients that its backward returns.
        through: Calls the subject.

    Raises:
        WrongFormError: An output has a wrong shape or dtype.
    """
    tensors = inputs._asdict()
    leaves = {name: tensors[name[1:]].detach().requires_grad_() for name in wanted}
    given = inputs._replace(**{name[1:]: leaf for name, leaf in leaves.items()})
    # lse does not depend on v.
    losses = inputs._replace(dlse=None) if [*wanted] == ["dv"] else inputs
    q, k, v = given[:3]
    out, lse = through(lambda: subject.run(q, k, v, problem, **_added(given)))
    _check_form("out", out, q, (*q.shape[:3], v.shape[3]))
    results = {"out": out}
    if lse is not None:
        _check_form("lse", lse, q, tuple(q.shape[:3]))
        results["lse"] = lse

    def gradients(retain_graph: bool) -> dict[str, torch.Tensor]:
        return _gradients(subject, problem, leaves, losses, out, lse, retain_graph=retain_graph)

    return OpenCall(results, gradients if wanted else None)


def merge_call(
    subject: Subject, states: States, wanted: Sequence[str], through: Through = _directly
) -> OpenCall:
    """Run the forward of a merge, inside of ``running``; the arguments are as above.

    Raises:
        WrongFormError: An output has a wrong shape or dtype.
    """
    tensors = states._asdict()
    leaves = {name: tensors[name[1:]].detach().requires_grad_() for name in wanted}
    given = states._replace(**{name[1:]: leaf for name, leaf in leaves.items()})
    out, lse = through(lambda: subject.run_states(given.outs, given.lses))
    _check_form("out", out, given.outs, tuple(given.outs.shape[1:]))
    _check_form("lse", lse, given.outs, tuple(given.lses.shape[1:]))
    # lse does not depend on outs.
    losses = [(out, states.dout), (lse, states.dlse)][: 1 if [*wanted] == ["douts"] else 2]

    def gradients(retain_graph: bool) -> dict[str, torch.Tensor]:
        of, loss = zip(*losses, strict=True)
        found = torch.autograd.grad(of, [*leaves.values()], loss, retain_graph=retain_graph)
        return dict(zip(leaves, found, strict=True))

    return OpenCall({"out": out, "lse": lse}, gradients if wanted else None)


def cache_call(subject: Subject, problem: Problem, x: CacheInputs) -> OpenCall:
    """Make a call with a cache, inside of ``running``; see ``run_kvcache``.

    Raises:
        WrongFormError: An output has a wrong shape or dtype.
    """
    new = 0 if x.k is None else x.k.shape[2]
    held = tuple(length + new for length in x.cache_seqlens.tolist())
    # A place in the table makes an entry without keys one of padding alone.
    N = max((*held, min(1, x.table.shape[1])), default=0)
    of_call = dataclasses.replace(
        problem, B=len(x.q), M=x.q.shape[2], N=N,
        mask=dataclasses.replace(problem.mask, seqlens_k=held),
    )  # fmt: skip
    out, lse = subject.run_kvcache(
        x.q, x.k_cache, x.v_cache, of_call, cache_seqlens=x.cache_seqlens,
        page_table=x.page_table, cache_batch_idx=x.cache_batch_idx, k=x.k, v=x.v,
        alibi_slopes=x.alibi_slopes, sinks=x.sinks, k_scale=x.k_scale, v_scale=x.v_scale,
    )  # fmt: skip
    _check_form("out", out, x.q, (*x.q.shape[:3], x.v_cache.shape[3]))
    results = {"out": out}
    if lse is not None:
        _check_form("lse", lse, x.q, tuple(x.q.shape[:3]))
        results["lse"] = lse
    return OpenCall(results, None)


def quantised_call(subject: Subject, problem: QuantisedProblem, x: QuantisedInputs) -> OpenCall:
    """Make a call with codes and scales, inside of ``running``.

    Raises:
        WrongFormError: An output has a wrong shape or dtype.
    """
    like = x.q_scale.new_empty(0, dtype=TORCH_DTYPES[problem.dtype])
    out, lse = subject.run_quantised(*x, problem=problem.attention, out_dtype=like.dtype)
    shape = (*x.q.shape[:3], x.v.shape[3])
    _check_form("out", out, like, shape)
    results = {"out": out}
    if lse is not None:
        _check_form("lse", lse, like, shape[:3])
        results["lse"] = lse
    return OpenCall(results, None)


@contextmanager
def running(inputs: Inputs | States | UnchangedInputs | QuantisedInputs) -> Iterator[None]:
    """Fill uninitialised memory inside the block, and convert exceptions.

    Raises:
        SubjectError: The block raises, or changes an input.
        RefusedError: The subject refuses a call.
    """
    with faults_of_the_subject(inputs), _poisoned_allocations():
        yield


def _run(subject: Subject, problem: Problem, inputs: Inputs) -> Outputs[torch.Tensor | None]:
    # A kernel without a backward pass may refuse inputs that require gradients.
    wanted = ("dq", "dk", "dv") if subject.backward else ()
    with _poisoned_allocations():
        call = attention_call(subject, problem, inputs, wanted)
        got = call.forward
        forward = Outputs(got["out"], got.get("lse"), None, None, None)
        if call.gradients is None:
            return forward
        with _exceptions_of_the_subject(forward):
            if not call.results["out"].requires_grad:
                raise AssertionError(
                    f"out of {subject.name} has no gradient; a kernel without one declares "
                    "backward=False"
                )
            gradients = call.gradients(False)
    return forward._replace(**gradients)


def _gradients(
    subject: Subject,
    problem: Problem,
    leaves: dict[str, torch.Tensor],
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    retain_graph: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the gradients of a loss on out and, if the problem has dlse, on lse, by name.

    If dout is "zero", the loss is on lse only.
    """
    losses = [(out, inputs.dout)]
    if inputs.dlse is not None:
        if lse is None or not lse.requires_grad:
            raise AssertionError(
                "lse has no gradient; a kernel without one declares lse_grad=False"
            )
        losses = [*losses, (lse, inputs.dlse)][problem.dout == "zero" :]
    of, given = zip(*losses, strict=True)
    found = torch.autograd.grad(
        of, tuple(leaves.values()), given, allow_unused=True, retain_graph=retain_graph
    )
    gradients: dict[str, torch.Tensor] = {}
    for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
        if gradient is None and name == "dv" and of[0] is lse:
            gradient = torch.zeros_like(leaf)  # lse does not depend on v
        if gradient is None:
            raise AssertionError(
                f"out of {subject.name} does not depend on the input that {name} is the gradient of"
            )
        _check_form(name, gradient, leaf, tuple(leaf.shape))
        gradients[name] = gradient
    return gradients


@dataclass(frozen=True)
class PlannedRun:
    """A problem prepared to run many times, with all results that do not depend on the run.

    Args:
        problem: The problem.
        inputs: Its tensors.
        judgement: Bound, sums of |terms| and range, for the numerics of a subject.
        want: The outputs of the float64 oracle.
    """

    problem: Problem
    inputs: Inputs
    judgement: Judgement
    want: Outputs[torch.Tensor]

    def run(self, subject: Subject) -> AttentionTrial:
        """Run a subject, whose numerics must be those that the run was planned for.

        Raises:
            SubjectError: The subject raises, or an output has a wrong shape or dtype.
            RefusedError: The subject refuses the problem.
        """
        # On a CPU a write out of bounds would corrupt the heap and crash the process later.
        with GuardBands() if self.problem.device == "cpu" else nullcontext():
            try:
                got = run_subject(subject, self.problem, self.inputs)
            except SubjectError as error:
                error.trial = error.forward and self.trial(subject, error.forward)
                raise
        return self.trial(subject, got)

    def trial(self, subject: Subject, got: Outputs[torch.Tensor | None]) -> AttentionTrial:
        """Return the trial of outputs that a subject has computed from the inputs."""
        return AttentionTrial(subject, self.problem, self.inputs, got, self.want, self.judgement)


def plan_in_range(
    subject: Subject, problem: Problem, inputs: Inputs, p_factor: float = 1.0
) -> PlannedRun:
    """Make the bound and the reference of a problem.

    Args:
        subject: The subject, whose numerics determine the bound.
        problem: The problem.
        inputs: Tensors of its shapes and dtype.
        p_factor: As in ``error_model.judge``.

    Raises:
        OutOfRangeError: The problem is out of range, so that a correct kernel may fail.
        RuntimeError: A bound is not finite although the problem is in range, an error of the suite.
    """
    # Without records for autograd, operations on small tensors take a quarter less time.
    with torch.inference_mode():
        judgement = error_model.judge(
            *inputs,
            mask=problem.mask,
            sm_scale=problem.scale,
            in_dtype=problem.dtype,
            numerics=subject.numerics_of(problem),
            softcap=problem.softcap,
            p_factor=p_factor,
        )
    if judgement.out_of_range is not None:
        raise OutOfRangeError(judgement.out_of_range)
    # If another bound is not finite, the problem is out of range.
    if not math.isfinite(judgement.largest_lse_bound):
        raise RuntimeError(f"the bound is not finite, so nothing was judged: {problem.to_json()}")
    want = torch_reference.attention(
        *inputs, mask=problem.mask, sm_scale=problem.scale, softcap=problem.softcap
    )
    return PlannedRun(problem, inputs, judgement, want)


def plan_run(
    subject: Subject, problem: Problem, inputs: Inputs | None = None, p_factor: float = 1.0
) -> PlannedRun | None:
    """Make the inputs, the bound and the reference of a problem.

    Args:
        subject: The subject, whose numerics determine the bound.
        problem: The problem.
        inputs: Tensors to use instead of the problem's own, of the same shapes and dtype.
        p_factor: As in ``error_model.judge``.

    Returns:
        The planned run; None if the problem is out of range, so that a correct kernel may fail.

    Raises:
        RuntimeError: A bound is not finite although the problem is in range, an error of the suite.
    """
    try:
        inputs = make(problem) if inputs is None else inputs
        return plan_in_range(subject, problem, inputs, p_factor)
    except OutOfRangeError:
        return None


def run_trial(subject: Subject, problem: Problem) -> AttentionTrial | None:
    """Plan and run a problem; return None if it is out of range.

    Raises:
        SubjectError: The subject raises, or an output has a wrong shape or dtype.
        RefusedError: The subject refuses the problem.
        RuntimeError: A bound is not finite although the problem is in range, an error of the suite.
    """
    planned = plan_run(subject, problem)
    return None if planned is None else planned.run(subject)
