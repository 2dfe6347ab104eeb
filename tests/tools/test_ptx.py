"""The digests of compiled kernels ignore names, and nothing that changes code."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from tests.support.ptx import compare, digest_tree, normalize_ptx, normalize_ttir, number_values

PTX = """
//
.version 8.7
.target sm_90a
	// .globl	sum_kernel              // -- Begin function sum_kernel
.visible .entry sum_kernel(
	.param .u64 .ptr .global .align 1 sum_kernel_param_0,
	.param .u32 sum_kernel_param_1
)
.reqntid 128
{
	.reg .b32 	%r<139>;
	.loc	1 58 0                          // kernels.py:58:0
$L__func_begin0:
	ld.param.b64 	%rd9, [sum_kernel_param_0];
$L__BB0_1:                              // %._crit_edge
	ld.param.b32 	%r37, [sum_kernel_param_1];
$L__tmp3:
	add.s32 	%r38, %r37, 1;
	ret;
$L__func_end0:
}
	.file	1 "/folder/kernels.py"
	.section	.debug_abbrev
	{
.b8 1                                   // Abbreviation Code
	}
	.section	.debug_macinfo	{	}
"""

ARGUMENTS = '%x_ptr: !tt.ptr<bf16> {tt.divisibility = 16 : i32} loc("x_ptr"(#loc)), %rows: i32 loc("rows"(#loc))'
TTIR = """
#loc = loc("/folder/kernels.py":58:0)
#loc29 = loc("x_ptr"(#loc))
module {
  tt.func public @sum_kernel(ARGUMENTS) attributes {noinline = false} {
    %c16_i32 = arith.constant 16 : i32 loc(#loc3)
    %rows_2 = arith.muli %rows, %c16_i32 : i32 loc(#loc39)
    %value = tt.addptr %x_ptr, %rows_2 : !tt.ptr<bf16>, i32 loc(#loc52)
    tt.return loc(#loc28)
  } loc(#loc)
} loc(#loc)
""".replace('ARGUMENTS', ARGUMENTS)


@pytest.mark.parametrize(
    ('old', 'new'),
    [
        ('sum_kernel', 'total_kernel'),
        ('kernels.py', 'other.py'),
        ('.loc	1 58 0', '.loc	1 59 4'),
        ('$L__tmp3', '$L__tmp4'),
        ('Code\n', 'Code\n.b8 7\n'),
        ('sum_kernel_param_1', 'sum_kernel_param_5'),
        ('.param .u32 sum_kernel_param_1\n', '.param .u32 sum_kernel_param_1,\n	.param .u32 sum_kernel_param_2\n'),
    ],
)
def test_names_do_not_change_ptx(old: str, new: str) -> None:
    assert old in PTX
    assert normalize_ptx(PTX.replace(old, new)) == normalize_ptx(PTX)


@pytest.mark.parametrize(
    ('old', 'new'),
    [
        ('%r37, 1', '%r37, 2'),
        ('.reqntid 128', '.reqntid 256'),
        ('%r37, [sum_kernel_param_1]', '%r37, [sum_kernel_param_0]'),
        ('%rd9, [sum_kernel_param_0]', '%rd9, [sum_kernel_param_0+4]'),
        ('	ret;\n', ''),
    ],
)
def test_instructions_change_ptx(old: str, new: str) -> None:
    assert old in PTX
    assert normalize_ptx(PTX.replace(old, new)) != normalize_ptx(PTX)


@pytest.mark.parametrize(
    ('old', 'new'),
    [
        ('sum_kernel', 'total_kernel'),
        ('%rows', '%lines'),
        ('%c16_i32', '%cst'),
        ('58:0', '59:0'),
        ('x_ptr"(#loc)', 'x_ptr"(#loc7)'),
        (ARGUMENTS, '%rows: i32, %unused: f32, %x_ptr: !tt.ptr<bf16> {tt.divisibility = 16 : i32}'),
    ],
)
def test_names_do_not_change_ttir(old: str, new: str) -> None:
    assert old in TTIR
    assert normalize_ttir(TTIR.replace(old, new)) == normalize_ttir(TTIR)


@pytest.mark.parametrize(
    ('old', 'new'),
    [
        ('constant 16', 'constant 8'),
        ('muli', 'addi'),
        ('%rows, %c16_i32', '%rows, %rows'),
        ('%rows: i32', '%rows: i32 {tt.divisibility = 16 : i32}'),
        ('ptr<bf16> {tt', 'ptr<f16> {tt'),
        ('noinline = false', 'noinline = true'),
    ],
)
def test_operations_change_ttir(old: str, new: str) -> None:
    assert old in TTIR
    assert normalize_ttir(TTIR.replace(old, new)) != normalize_ttir(TTIR)


def test_values_are_numbered_by_definition() -> None:
    """A region may use a name of the region beside it again, for another value."""
    loops = """
      %a, %b = tt.split %x : t
      %c:2 = scf.for %i = %a to %b step %s iter_args(%k = %a, %l = %b) {
      ^bb0(%m: f32, %n: f32):
        %d = add %k, %m
      }
      %D = add %c#1, %a
    """
    expected = """
      %0, %1 = tt.split %2 : t
      %3:2 = scf.for %4 = %0 to %1 step %5 iter_args(%6 = %0, %7 = %1) {
      ^bb0(%8: f32, %9: f32):
        %10 = add %6, %8
      }
      %11 = add %3#1, %0
    """
    for name in ('%d', '%e', '%d.1_7'):
        assert number_values(loops.replace('%D', name))[0] == expected


def make_file(**kernels: dict[str, str]) -> dict[str, Any]:
    return {'build': ['sm90'], 'only': '', 'kernels': [{'kernel': name, **codes} for name, codes in kernels.items()]}


def test_comparison_names_what_differs() -> None:
    before = make_file(a={'ttir': '1', 'ptx': '11'}, b={'ttir': '2', 'ptx': '12'}, c={'ttir': '3', 'ptx': '13'})
    after = make_file(a={'ttir': '1', 'ptx': '11'}, renamed={'ttir': '2', 'ptx': '12'}, c={'ttir': '3', 'ptx': '14'})
    assert compare(before, before) == ([], [], [])
    assert compare(before, after) == (['c'], ['c'], [('b', 'renamed')])
    without_ptx = make_file(**{name: {'ttir': code} for name, code in (('a', '1'), ('b', '2'), ('c', '3'))})
    assert compare(without_ptx, after) == ([], [], [('b', 'renamed')])
    with pytest.raises(ValueError, match=r"^build must be equal in both files, got \['sm80'\] and \['sm90'\]$"):
        compare(before | {'build': ['sm80']}, after)


def test_digests_of_a_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path))
    root = Path(__file__).parents[2]
    args = argparse.Namespace(
        build=('sm90', 'bfloat16', '64', 'one'), only='rotary', stage='ttir', builds='tests.support.builds'
    )
    file = digest_tree(root, args)
    names = {kernel['kernel'].rsplit('.', 1)[1] for kernel in file['kernels']}
    assert names == {'rotary_kernel', 'sum_kernel', 'norm_rotary_kernel', 'norm_rotary_backward_kernel'}
    assert compare(file, file) == ([], [], [])
