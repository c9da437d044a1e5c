"""Masks with a predicate: definition, combination, generation, serialisation, errors."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import hypothesis
import pytest
import torch

from fa_verify.oracles.masks.codec import (
    MASKS,
    SHIPPED,
    mask_class,
    mask_from_record,
    mask_to_record,
    register,
)
from fa_verify.oracles.masks.document import Document
from fa_verify.oracles.masks.mask import Between, Both, Either, Mask, Sliced
from fa_verify.oracles.masks.neighbourhood import Neighbourhood
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.masks.tree import Tree
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.torch_reference import RowMasks
from fa_verify.properties.kernels.loading import load_mask
from fa_verify.properties.kinds.reductions import reductions
from fa_verify.properties.problems.mask_classes import check_mask_class, draw_instance
from fa_verify.properties.problems.strategies import problems
from fa_verify.properties.search.search import draws

PLAIN = Mask(window_left=1, window_right=1, seqlens_q=(4, 3), seqlens_k=(5, 5))
CUSTOM = PrefixLM(prefix=2, seqlens_q=(4, 3), seqlens_k=(5, 5))


def picture(mask, B=1, M=4, N=4):
    rows = mask.dense(B, 1, M, N)[0, 0].tolist()
    return [" ".join("x" if seen else "." for seen in row) for row in rows]


def test_each_example_is_what_its_picture_shows():
    assert picture(PrefixLM(prefix=2)) == ["x x . .", "x x . .", "x x x .", "x x x x"]
    assert picture(Document(starts=((2,),))) == ["x x . .", "x x . .", ". . x x", ". . x x"]
    assert picture(Tree(parents=(-1, 0, 0))) == ["x . . .", "x x . .", "x x x .", "x x . x"]
    dilated = mask_class("Dilated")(width=2, step=2)
    assert picture(dilated) == ["x . . .", ". x . .", "x . x .", ". x . x"]
    sink = mask_class("SinkWindow")(sinks=1, width=1)
    assert picture(sink) == ["x . . .", "x x . .", "x . x .", "x . . x"]
    # Four rows of a grid of width two; a 3 x 3 square is cut to fit.
    assert picture(Neighbourhood(width=2, kernel=1)) == [
        "x . . .", ". x . .", ". . x .", ". . . x",
    ]  # fmt: skip
    blocks = mask_class("BlockSparse")(percent=50, seed=1).dense(1, 1, 384, 384)[0, 0]
    tiles = blocks.view(3, 128, 3, 128)
    assert torch.equal(tiles.any(3).any(1), tiles.all(3).all(1))
    assert 0 < int(tiles.any(3).any(1).sum()) < 9


def test_a_square_is_moved_in_at_the_border_of_a_grid():
    seen = Neighbourhood(width=5, kernel=3).dense(1, 1, 25, 25)[0, 0].view(25, 5, 5)
    assert (seen.sum((1, 2)) == 9).all()
    assert seen[0, :3, :3].all()
    assert seen[24, 2:, 2:].all()


@pytest.mark.parametrize("combine", [Both, Either])
def test_combinations_keep_the_lengths_of_their_parts(combine):
    part = dataclasses.replace(PLAIN, seqlens_q=None, seqlens_k=None)
    for first, second in ((PLAIN, CUSTOM), (part, CUSTOM), (CUSTOM, part)):
        mask = combine(first=first, second=second)
        assert (mask.seqlens_q, mask.seqlens_k) == ((4, 3), (5, 5))
    first, second = PLAIN.dense(2, 1, 4, 5), CUSTOM.dense(2, 1, 4, 5)
    want = first & second if combine is Both else first | second
    assert torch.equal(combine(first=PLAIN, second=CUSTOM).dense(2, 1, 4, 5), want)


def test_operators_combine_masks_and_nothing_else():
    assert PLAIN & CUSTOM == Both(first=PLAIN, second=CUSTOM)
    assert PLAIN | CUSTOM == Either(first=PLAIN, second=CUSTOM)
    for operator in ("__and__", "__or__"):
        assert getattr(PLAIN, operator)(True) is NotImplemented


def test_parts_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="seqlens_k of combined masks are"):
        PLAIN & dataclasses.replace(CUSTOM, seqlens_k=(5, 4))


def test_a_mask_can_be_seen_from_other_entries_and_heads():
    mask = dataclasses.replace(mask_class("BlockSparse")(seed=5), seqlens_q=(250, 256, 200))
    dense = mask.dense(3, 4, 256, 256)
    # Its own slices keep the class, and so the block mask; the general slices do not.
    for of in (mask.sliced, functools.partial(Mask.sliced, mask)):
        part = of((2, 0), (3, 1))
        assert isinstance(part, Sliced) == (of != mask.sliced)
        assert torch.equal(part.dense(2, 2, 256, 256), dense[[2, 0]][:, [3, 1]])
        assert torch.equal(part.sliced((1,), (0,)).dense(1, 1, 256, 256), dense[[0]][:, [3]])
    # A mask that depends on neither needs no table.
    assert type(CUSTOM.sliced((1,), (0,))) is PrefixLM


def test_entries_that_come_twice_are_refused():
    with pytest.raises(ValueError, match="needs different batch entries"):
        Sliced(mask=CUSTOM, entries=(0, 0))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_mask_survives_its_json(name):
    made = {
        "Both": PLAIN & CUSTOM,
        "Either": (PLAIN & Mask(causal=True)) | CUSTOM,
        "Sliced": Document(starts=((1, 3), (2,)), seqlens_k=(5, 4)).sliced((1,)),
        "Document": Document(starts=((1, 3), (2,)), causal=True),
        "Tree": Tree(parents=(-1, 0, 0, 1)),
    }
    mask = made.get(name) or mask_class(name)()
    assert type(mask).__name__ == name
    problem = Problem(B=len(mask.seqlens_k or (0,)), M=4, N=5, mask=mask)
    assert Problem.from_json(problem.to_json()) == problem
    assert mask_from_record(mask_to_record(mask)) == mask


def test_the_old_name_of_a_mask_is_still_read():
    old = (
        '{"version":1,"M":4,"N":5,"mask":{"type":"Taken","mask":{"type":"PrefixLM"},"entries":[0]}}'
    )
    problem = Problem.from_json(old)
    assert problem.mask == Sliced(mask=PrefixLM(), entries=(0,))
    assert problem.to_json() == old.replace("Taken", "Sliced")


def test_a_mask_that_defines_allows_is_refused_with_the_new_name():
    with pytest.raises(TypeError, match=r"^Old defines allows; the method is called mask_mod$"):

        class Old(Mask):
            def allows(self, b, h, m, n, *, M, N):
                return n <= m


@dataclass(frozen=True, kw_only=True)
class Unwritten(Mask):
    width: Annotated[int, Between(1, 4)] = 1

    def mask_mod(self, b, h, m, n, *, M, N):
        return n - m < self.width


def test_a_mask_without_a_jit_predicate_is_refused_by_name(device):
    pytest.importorskip("triton")
    from fa_kernels import flash_attention

    q = torch.zeros(1, 1, 2, 16, device=device)
    with pytest.raises(NotImplementedError, match="Unwritten has no native predicate"):
        flash_attention(q, q, q, mask=Unwritten())


def test_a_name_is_known_once(monkeypatch):
    monkeypatch.delitem(MASKS, "PrefixLM", raising=False)

    class Other(Mask):
        pass

    Other.__name__ = "PrefixLM"
    with pytest.raises(ValueError, match="a mask named PrefixLM is known already"):
        register(Other)


def test_a_shipped_mask_is_the_same_one_by_its_file_and_by_its_module():
    file = Path(inspect.getfile(PrefixLM))
    assert load_mask(f"{file}:PrefixLM") is PrefixLM
    assert load_mask(f"{os.path.relpath(file)}:PrefixLM") is PrefixLM
    assert load_mask("fa_verify.oracles.masks.prefix_lm:PrefixLM") is PrefixLM


def test_a_mask_that_has_the_name_of_a_shipped_one_is_refused(tmp_path):
    # Its replay lines would name the shipped mask.
    file = tmp_path / "prefix_lm.py"
    file.write_text(Path(inspect.getfile(PrefixLM)).read_text())
    with pytest.raises(ValueError, match="a mask named PrefixLM is known already"):
        load_mask(f"{file}:PrefixLM")


def test_fields_without_bounds_are_refused_by_name():
    @dataclass(frozen=True, kw_only=True)
    class Loose(Mask):
        width: int = 1

    with pytest.raises(
        ValueError, match=r"Loose\.width is annotated with <class 'int'>; needs bool"
    ):
        check_mask_class(Loose)

    class Undecorated(Mask):
        pass

    with pytest.raises(ValueError, match=r"Undecorated needs @dataclass\(frozen=True"):
        check_mask_class(Undecorated)


def test_masks_of_a_class_are_drawn_within_its_bounds_with_lengths_and_without():
    seen = set()

    @draws(60)
    @hypothesis.seed(0)
    @hypothesis.given(problem=problems(mask=Unwritten, masks=("full", "padding")))
    def drawn(problem):
        assert type(problem.mask) is Unwritten
        seen.add((problem.mask.width, problem.mask.seqlens_k is None))

    drawn()
    assert seen == {(width, given) for width in range(1, 5) for given in (False, True)}


def test_a_draw_that_gives_no_mask_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Mask):
        @classmethod
        def draw(cls, rng, B, H, M, N):
            assert isinstance(rng, random.Random)
            return None

    with pytest.raises(TypeError, match=r"Wrong\.draw returns None; needs a Mask"):
        draw_instance(lambda strategy: 0, Wrong, 1, 1, 1, 1)


def test_a_failing_mask_is_tried_without_its_predicate_and_with_smaller_fields():
    problem = Problem(M=4, N=5, mask=PrefixLM(prefix=9, seqlens_k=(4,)))
    masks = [simpler.mask for simpler in reductions(problem)]
    assert Mask(seqlens_k=(4,)) in masks
    assert {x.prefix for x in masks if isinstance(x, PrefixLM)} >= {0, 1, 4, 8, 9}
    dilated = Problem(M=4, N=5, mask=mask_class("Dilated")(width=2, step=1))
    masks = [simpler.mask for simpler in reductions(dilated)]
    assert {(x.width, x.step) for x in masks if not x.is_plain} == {(2, 1), (1, 1)}
    combined = Problem(M=4, N=5, mask=PrefixLM(prefix=3) & Mask(causal=True))
    assert PrefixLM(prefix=3) in [simpler.mask for simpler in reductions(combined)]


@pytest.mark.parametrize("rows", [(4, 3), (4, 0)])
def test_the_oracle_reads_a_predicate_row_by_row(rows):
    mask = dataclasses.replace(CUSTOM, seqlens_q=rows)
    read = RowMasks(mask, 2, 3, 4, 5, torch.device("cpu"))
    parts = [read.between(start, start + 2).expand(2, 3, 2, 5) for start in (0, 2)]
    assert torch.equal(torch.cat(parts, 2), mask.dense(2, 3, 4, 5).expand(2, 3, 4, 5))


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("Dilated", "width"),
        ("Dilated", "step"),
        ("SinkWindow", "width"),
        ("BlockSparse", "side"),
        ("Neighbourhood", "width"),
        ("Neighbourhood", "kernel"),
    ],
)
def test_sizes_below_one_are_refused_by_name(name, field):
    with pytest.raises(ValueError, match=f"^{field} is 0; needs an int >= 1$"):
        mask_class(name)(**{field: 0})
    with pytest.raises(TypeError, match=f"^{field} is 2.0; needs an int$"):
        mask_class(name)(**{field: 2.0})


def test_sliced_entries_keep_their_predicate():
    mask = Document(starts=((1,), (2,), (3,)))
    dense = mask.dense(3, 1, 5, 5)
    assert torch.equal(mask.sliced((2, 0)).dense(2, 1, 5, 5), dense[[2, 0]])
    assert torch.equal(mask.sliced((2, 0)).sliced((1,)).dense(1, 1, 5, 5), dense[[0]])


def test_the_definition_and_the_dense_form_say_the_same():
    dense = CUSTOM.dense(2, 1, 4, 5)
    for b, m, n in (dense[:, 0] >= 0).nonzero().tolist():
        assert CUSTOM.is_visible(b, 0, m, n, M=4, N=5) == bool(dense[b, 0, m, n])


class Asked(Mask, uniform=True):
    """A mask that raises for rows and keys from 2 on."""

    def mask_mod(self, b, h, m, n, *, M, N):
        assert int(m.max()) < 2
        assert int(n.max()) < 2
        return m >= n


def test_the_dense_form_evaluates_only_valid_rows_and_keys():
    seen = Asked(seqlens_q=(2, 0), seqlens_k=(2, 4)).dense(2, 1, 4, 4)
    assert seen.nonzero().tolist() == [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


@dataclass(frozen=True, kw_only=True, eq=False)
class OfTensor(Mask):
    """A mask that holds a tensor, which ``==`` cannot compare."""

    table: object = None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class OfSlot(Mask):
    """As ``OfTensor``, with the tensor in a slot."""

    table: object = None


class OfAttribute(Mask):
    """A mask without fields of its own, whose instances hold a tensor."""

    def __init__(self, table):
        super().__init__()
        object.__setattr__(self, "table", table)


@pytest.mark.parametrize(
    "make", [lambda x: OfTensor(table=x), lambda x: OfSlot(table=x), OfAttribute]
)
def test_masks_that_inherit_equality_and_hold_more_are_equal_to_themselves_alone(make):
    one, two = make(torch.zeros(2, 2)), make(torch.ones(2, 2))
    assert one == one
    assert one != two
    assert len({one, two, one}) == 2
    assert make(one.table) != one


def test_combined_masks_are_equal_if_they_hold_the_same_masks():
    one, two = (OfTensor(table=torch.full((2, 2), fill)) for fill in (0.0, 1.0))
    assert Sliced(mask=one, entries=(0,)) != Sliced(mask=two, entries=(0,))
    assert one & PLAIN != two & PLAIN
    assert CUSTOM & PLAIN == CUSTOM & PLAIN


def test_masks_of_windows_and_lengths_are_equal_by_their_fields():
    again = Mask(window_left=1, window_right=1, seqlens_q=(4, 3), seqlens_k=(5, 5))
    assert (again, hash(again)) == (PLAIN, hash(PLAIN))
    assert again != dataclasses.replace(PLAIN, seqlens_k=(5, 4))
    assert Mask() != CUSTOM
    assert PrefixLM(prefix=2, seqlens_q=(4, 3), seqlens_k=(5, 5)) == CUSTOM
