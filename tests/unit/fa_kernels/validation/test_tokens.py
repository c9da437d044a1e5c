"""Tokens of opaque handles: equality of objects, eviction, and torch.compile."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.document import Document
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM

pytest.importorskip("triton")

from fa_kernels import Config, Tile
from fa_kernels.validation import opaque_handles
from fa_kernels.validation.opaque_handles import token_of, value_of

VALUES = [
    PrefixLM(prefix=3, seqlens_q=(4, 5)),
    Document(starts=((2, 3), ())),
    BlockSparse(side=4, percent=50, seed=7),
    PrefixLM(prefix=5) & Mask(window_left=2),
    PrefixLM(prefix=5) | (PrefixLM(prefix=6) & Mask(causal=True)),
    Config(forward=Tile(16, 32), dots="tf32"),
]
values = pytest.mark.parametrize("value", VALUES, ids=repr)


def copied(value):
    """A deep copy of an object."""
    if isinstance(value, tuple):
        return tuple([copied(x) for x in value])
    if not dataclasses.is_dataclass(value):
        return value
    fields = (x.name for x in dataclasses.fields(value))
    return dataclasses.replace(value, **{x: copied(getattr(value, x)) for x in fields})


@values
def test_equal_objects_have_one_token_that_says_what_it_is(value):
    token = token_of(value)
    assert token_of(copied(value)) == token
    assert token.startswith(f"{value!r} #")
    assert value_of(token) == value


def test_other_objects_have_other_tokens():
    assert len({token_of(x) for x in VALUES}) == len(VALUES)


class Nameless:
    """Objects with equal representations."""

    def __repr__(self):
        return "Nameless()"


def test_objects_that_look_the_same_have_other_tokens():
    first, second = Nameless(), Nameless()
    assert token_of(first) != token_of(second)
    assert value_of(token_of(first)) is first


def test_the_most_recently_used_tokens_are_kept(monkeypatch):
    monkeypatch.setattr(opaque_handles, "MOST", 3)
    for name in ("_tokens", "_values"):
        monkeypatch.setattr(opaque_handles, name, type(getattr(opaque_handles, name))())
    first, second, third = (token_of(PrefixLM(prefix=x)) for x in range(3))
    token_of(PrefixLM(prefix=0))
    value_of(second)
    token_of(PrefixLM(prefix=3))
    assert value_of(first) == PrefixLM(prefix=0)
    assert value_of(second) == PrefixLM(prefix=1)
    with pytest.raises(RuntimeError, match=r"prefix=2\) #\d+', which is from another pr"):
        value_of(third)
    assert len(opaque_handles._tokens) == len(opaque_handles._values) == 3
    assert token_of(PrefixLM(prefix=2)) != third


def test_a_token_of_another_process_is_refused():
    made = (
        "from fa_kernels import Config\n"
        "from fa_kernels.validation.opaque_handles import token_of\n"
        "print(token_of(Config(dots='tf32')))"
    )
    theirs = subprocess.run(
        [sys.executable, "-c", made], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert theirs.startswith("Config(forward=None")
    assert theirs.endswith(") #1")
    token_of(PrefixLM(prefix=1))
    token_of(Config(dots="tf32"))
    with pytest.raises(RuntimeError, match="which is from another process or older than the last"):
        value_of(theirs)


library = torch.library.Library("fa_test_tokens", "DEF")
library.define("told(Tensor x, str token) -> Tensor")
TOLD = []
library.impl("told", lambda x, token: TOLD.append(token) or x.clone(), "CPU")
torch.library.register_fake("fa_test_tokens::told", lambda x, _: torch.empty_like(x), lib=library)


def told(x, value):
    return torch.ops.fa_test_tokens.told(x, token_of(value))


def compiled(function, **how):
    counter = CompileCounter()
    return torch.compile(function, backend=counter, fullgraph=True, **how), counter


def told_by(call, *arguments):
    TOLD.clear()
    call(torch.ones(3), *arguments)
    (token,) = TOLD
    return value_of(token)


@values
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_call_has_the_token_and_is_compiled_once_for_equal_objects(value, dynamic):
    call, counter = compiled(told, dynamic=dynamic)
    for given in (value, value, copied(value)):
        assert told_by(call, given) == value
        assert TOLD == [token_of(value)]
    assert counter.frame_count == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_call_is_compiled_again_for_another_object(dynamic):
    call, counter = compiled(told, dynamic=dynamic)
    given = [
        PrefixLM(prefix=3),
        PrefixLM(prefix=4),
        PrefixLM(prefix=4) & Mask(window_left=2),
        PrefixLM(prefix=4) & Mask(window_left=3),
        Document(starts=((2, 3),)),
        Document(starts=((2, 4),)),
        Config(forward=Tile(16, 16)),
    ]
    for value in (*given, *map(copied, given)):
        assert told_by(call, value) == value
    assert counter.frame_count == len(given)


def test_an_object_that_is_made_in_what_is_compiled_has_the_fields_that_it_is_given():
    call, _ = compiled(lambda x: told(x, Config(forward=Tile(64, 16), dots="tf32")))
    assert told_by(call) == Config(forward=Tile(64, 16), dots="tf32")


@dataclass(frozen=True)
class Derived:
    """A dataclass in which one field is derived from the other."""

    given: int
    twice: int = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "twice", 2 * self.given)


def test_fields_that_are_not_given_follow():
    assert told_by(compiled(told)[0], Derived(3)).twice == 6


@dataclass(unsafe_hash=True)
class Changing:
    """A mutable dataclass."""

    given: int


class Held(SimpleNamespace):
    """A hashable class that is not a dataclass."""

    __hash__ = object.__hash__


@pytest.mark.parametrize("value", [Changing(3), Held(given=3)], ids=["not_frozen", "no_dataclass"])
def test_what_the_compiler_cannot_guard_is_refused(value):
    assert value_of(token_of(value)) == value
    of = type(value).__name__
    with pytest.raises(Exception, match=f"mask holds a {of}; under torch.compile needs frozen"):
        compiled(told)[0](torch.ones(3), value)
