"""Snapshots: differences between two of them, and normalisation of code."""

from __future__ import annotations

import pytest

from tests.snapshots.cases import MASKS, Case
from tests.snapshots.comparing import difference, read, write
from tests.snapshots.launches import launches
from tests.snapshots.listings import claims_of, renamed
from tests.snapshots.normalising import flow_of, plain_ir, plain_ptx
from tests.snapshots.problems import cases

THEN = {"a": {"out": "1", "dq": "2"}, "b": 3, "c": 4}

IR = """
#loc = loc(unknown)
#loc1 = loc("x_ptr")
module {
  tt.func public @copy(%x_ptr: !tt.ptr<f32> loc("x_ptr"), %n: i32 loc("n")) {
    %c1 = arith.constant 1 : i32 loc(#loc)
    %0 = arith.subi %n, %c1 : i32 loc(#loc)
    %1 = tt.load %x_ptr : !tt.ptr<f32> loc(#loc)
    %r:2 = scf.for %i = %c1 to %0 step %c1 iter_args(%a = %1, %b = %1) -> (f32, f32)  : i32 {
      %2 = arith.addf %a, %b : f32 loc(#loc)
      scf.yield %2, %a : f32, f32 loc(#loc)
    } loc(callsite(#loc at #loc1))
    tt.store %x_ptr, %r#0 : !tt.ptr<f32> loc(#loc)
    tt.return loc(#loc)
  }
}
"""


def test_a_snapshot_is_read_as_it_was_written(tmp_path):
    write(THEN, tmp_path / "new" / "file.json")
    assert read(tmp_path / "new" / "file.json") == THEN
    assert difference(THEN, THEN) == []


def test_a_difference_names_what_is_missing_new_and_different():
    now = {"a": {"out": "1", "dq": "3"}, "b": 5, "d": 4}
    assert difference(THEN, now) == [
        "1 missing:", "  c", "1 new:", "  d", "2 different:", "  a: dq", "  b: 3 -> 5",
    ]  # fmt: skip


def test_long_differences_are_cut():
    lines = difference({}, {f"{i:02}": i for i in range(23)})
    assert lines[0] == "23 new:"
    assert lines[-2:] == ["  19", "  and 3 more"]


def test_parts_that_do_not_count_and_names_of_kernels_are_not_compared():
    then = {"a": {"kernel": "delta", "ir": "1", "ptx": "2"}}
    now = {"a": {"kernel": "preprocess", "ir": "3", "ptx": "2"}}
    assert difference(then, now) == ["1 different:", "  a: ir of preprocess"]
    assert difference(then, now, ["ptx"]) == []
    assert difference(then, {"a": then["a"] | {"kernel": "preprocess"}}) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@copy", "@copied"),
        ("%x_ptr", "%pointer"),
        ('loc("n")', 'loc("rows")'),
        ("%a", "%first"),
        ("loc(callsite(#loc at #loc1))", "loc(#loc1)"),
    ],
)
def test_names_and_places_do_not_count(old, new):
    assert old in IR
    other = IR.replace(old, new)
    assert plain_ir(other) == plain_ir(IR)
    assert flow_of(other) == flow_of(IR)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("arith.subi %n, %c1", "arith.subi %c1, %n"),
        ("arith.addf", "arith.subf"),
        ("arith.addf %a, %b", "arith.addf %a, %a"),
        ("scf.yield %2, %a", "scf.yield %a, %2"),
        ("%r#0", "%r#1"),
        ("constant 1", "constant 2"),
        ("to %0 step", "to %n step"),
        ("    tt.store %x_ptr, %r#0 : !tt.ptr<f32> loc(#loc)\n", ""),
    ],
)
def test_effects_of_code_count(old, new):
    assert old in IR
    other = IR.replace(old, new)
    assert plain_ir(other) != plain_ir(IR)
    assert flow_of(other) != flow_of(IR)


def test_the_order_of_pure_operations_counts_in_the_plain_code_alone():
    first, second = IR.splitlines(keepends=True)[6:8]
    other = IR.replace(first + second, second + first)
    assert other != IR
    assert plain_ir(other) != plain_ir(IR)
    assert flow_of(other) == flow_of(IR)


def test_ptx_is_compared_without_names_of_functions_and_comments():
    text = "// by LLVM\n.visible .entry {0}(\n.param .u64 {0}_param_0\n)\n  ld [{0}_param_0]; //\n"
    one, other = (plain_ptx(text.replace("{0}", name)) for name in ("copy", "other"))
    assert one == other
    assert "copy" not in one
    assert plain_ptx(text.replace("ld", "st")) != one


def test_claims_are_counted_without_files_and_folders():
    listed = "tests/a.py::test_x[1]\ntests/b.py::test_x[1]\ntests/b.py::test_y[a/b.py]\n\n3 tests\n"
    assert claims_of(listed) == {"test_x[1]": 2, "test_y[*.py]": 1}


def test_a_renamed_entry_is_compared_by_its_new_name():
    then = {"test_x[1]": 2, "test_x[2]": 1, "test_xy": 1, "test_z[2]": 3}
    found = renamed(then, "test_x -> test_z\ntest_xy -> test_y\n")
    assert found == {"test_z[1]": 2, "test_z[2]": 4, "test_y": 1}


@pytest.mark.parametrize("line", ["test_x", "test_q -> test_y"])
def test_a_line_that_renames_nothing_is_refused(line):
    with pytest.raises(ValueError, match="names no entry"):
        renamed({"test_x": 1}, line)


@pytest.mark.parametrize("of", [cases, launches])
def test_problems_have_keys_of_their_own_and_masks(of):
    keys = [case.key for case in of()]
    assert len(set(keys)) == len(keys) > 100
    assert {case.mask for case in of()} <= MASKS.keys()


def test_longer_problems_keep_what_is_empty_or_one_row():
    for short, long in zip(cases(), cases(7), strict=True):
        for was, now in ((short.M, long.M), (short.N, long.N)):
            assert now == was if was < 2 or was > 509 else was < now < 512


def test_a_key_says_what_differs_from_an_ordinary_problem():
    assert Case(one_pass=True).key == "padded 16x32 fp16 full one_pass M=37 N=50"
    assert Case(bias="", D=8).key == "padded 16x32 fp16 full M=37 N=50 D=8 bias="
