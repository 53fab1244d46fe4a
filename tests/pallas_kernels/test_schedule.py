"""Reading a schedule: cycles, loops, products and spills counted by hand on a small one."""

from pathlib import Path

import pytest

from pallas_kernels import aot, schedule
from pallas_kernels.bounded_decay import cases
from pallas_kernels.expert_dispatch import cases as expert_cases

FINAL = """
 iteration_bounds: (2, 3)
     0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = sadd.s32 1, %s1 }
   0x2   : > { %v1 = vmatmul.bf16.gmra.mxu0 %v0  ;;  %v2 = vmatmul.f32.gmra.mxu1 %v0 }
   0x3   : > { %7 = vst [vmem:[#allocation9_spill] sm:$0xff] %v1 }
   0x4   :  { %v3 = vld [vmem:[%s1] sm:$0xff] }
   0x5   : > { %p1 = scmp.ge.s32.totalorder %s2, 8 /* loop exit test */ }
   0x6   : > {}
   0x7   :  { %s3 = shalt }
"""
ORIGINAL = "#allocation1 [shape = 'f32[8,128]', space=vmem, size = 0x1000, scoped]"


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    (tmp_path / "1-k.1-07-final_bundles.txt").write_text(FINAL)
    (tmp_path / "1-k.1-06-schedule-analysis_final_bundles.txt").write_text("not this one")
    (tmp_path / "1-k.1-00-original.txt").write_text(ORIGINAL)
    return tmp_path


def test_a_kernel_by_hand(dump: Path) -> None:
    """A loop of 6 bundles, 2 x 3 grid steps (8 trips less the two that drain), 24 operand rows."""
    cost = schedule.kernel_cost("k.1", dump, aot.CHIPS["v5p"])
    assert (cost.step_bundles, cost.steps, cost.spills) == (6, 6, 1)
    assert cost.matrix_share == pytest.approx(24 / 4 / 6)
    assert cost.cycles == 8 + 5 * 6
    assert cost.vmem == 0x1000 + 4096


def test_a_loop_bound_by_its_products(dump: Path) -> None:
    chip = aot.CHIPS["v5p"]._replace(matrix_units=1)
    cost = schedule.kernel_cost("k.1", dump, chip)
    assert (cost.matrix_share, cost.cycles) == (1.0, 24 + 5 * 24)


def test_an_axis_of_unknown_length_counts_the_visits_that_are_given(dump: Path) -> None:
    text = FINAL.replace("(2, 3)", "(2, 2147483647)").replace(", 8 /* loop", ", %s9 /* loop")
    (dump / "1-k.1-07-final_bundles.txt").write_text(text)
    chip = aot.CHIPS["v5p"]
    assert schedule.kernel_cost("k.1", dump, chip).steps == 2
    assert schedule.kernel_cost("k.1", dump, chip, visits=5).steps == 10
    (dump / "1-k.1-07-final_bundles.txt").write_text(text.replace("(2, 2147483647)", "(1)"))
    assert schedule.kernel_cost("k.1", dump, chip, visits=5).steps == 5


def test_equal_kernels_share_a_schedule(dump: Path) -> None:
    call = (
        '%NAME = f32[8] custom-call(), custom_call_target="tpu_custom_call", '
        'operand_layout_constraints={f32[8]{0}}, backend_config={"body":"BODY"}'
    )
    lines = [call.replace("NAME", n).replace("BODY", b) for n, b in (("k.1", "x"), ("k.2", "x"))]
    costs = schedule.kernel_costs("\n".join(lines), dump, aot.CHIPS["v5p"])
    assert [(c.name, c.steps) for c in costs] == [("k.1", 6), ("k.2", 6)]
    lines.append(call.replace("NAME", "k.3").replace("BODY", "other"))
    with pytest.raises(FileNotFoundError, match=r"k\.3"):
        schedule.kernel_costs("\n".join(lines), dump, aot.CHIPS["v5p"])


def test_gathers_count_their_bytes() -> None:
    hlo = """
  ROOT %gather_fusion.1 = bf16[6,128]{1,0:T(8,128)} fusion(%x, %i), kind=kCustom, calls=%c
  %gather_fusion = f32[6]{0} fusion(%p, %i), kind=kCustom, calls=%d
  %fusion.2 = f32[6]{0} fusion(%p, %i), kind=kLoop, calls=%d
"""
    assert schedule.gathered_bytes(hlo) == 2 * (2 * 6 * 128 + 4 * 6)


def test_a_kernel_without_a_schedule_is_named(dump: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"other\.1"):
        schedule.kernel_cost("other.1", dump, aot.CHIPS["v5p"])


def test_loops_of_xla_count_their_trips() -> None:
    hlo = """
%body (p: s32[]) -> s32[] {
  %a = f32[8] fusion(), backend_config={"estimated_cycles":"10"}
}
%cond (p: s32[]) -> pred[] {
  %n = s32[] constant(7)
}
ENTRY %main () -> f32[8] {
  %b = f32[8] fusion(), backend_config={"estimated_cycles":"5"}
  %w = s32[] while(%t), condition=%cond, body=%body
  %k.3 = f32[8] custom-call(), custom_call_target="tpu_custom_call"
}
"""
    assert schedule.xla_cycles(hlo) == 5 + 7 * 10
    assert schedule.kernel_names(hlo) == ["k.3"]


def test_bounds_at_the_target_shape() -> None:
    shape = cases.Shape(B=1, T=8192, H=96, K=128, V=128)
    tokens = 8192 * 96
    forward = tokens * (4 * 2 * 128 + 4 * 128 + 4)  # q, k, v, o in bf16; g and beta in f32
    assert cases.least_bytes(shape, "forward", "bfloat16") == forward
    both = 2 * forward  # all of it in, and o and five gradients out
    assert cases.least_bytes(shape, "forward+backward", "bfloat16") == both


def test_bounds_of_the_experts_by_hand() -> None:
    shape = expert_cases.DEFAULT
    matrices = 14 * 4 * 3584 * 3072 * 2
    rows, numbers = 16384 * 3584 * 2, 16384 * 4
    forward = 2 * rows + matrices + 2 * numbers  # x, y, weights and experts
    assert expert_cases.least_bytes(shape, "forward", "bfloat16") == forward
    both = 4 * rows + 2 * matrices + 3 * numbers  # and dy, dx, the gradients of both
    assert expert_cases.least_bytes(shape, "forward+backward", "bfloat16") == both
    assert expert_cases.least_flops(shape, "forward+backward") == 24 * 16384 * 3584 * 3072


def test_visits_of_equal_experts() -> None:
    """1,170 or 1,171 rows each: five tiles of 256; in a dense order border tiles count twice."""
    visits = expert_cases.visits
    shape = expert_cases.DEFAULT
    assert visits("pallas", "any", shape) == 14 * 5
    assert visits("sorted", "any", shape) == visits("megablox", "gmm", shape) == 128 + 12
    assert visits("megablox", "tgmm", shape) == 32 + 12
    assert visits("tokamax", "any", shape) == 140 * 28 * 24


def test_matrix_units_make_the_peak() -> None:
    for name, chip in aot.CHIPS.items():
        width = {"v5p": 128, "v6e": 256}[name]
        rate = chip.cores * chip.matrix_units * chip.rows_a_cycle * 2 * width**2 * chip.clock
        assert rate == pytest.approx(chip.peak_flops, rel=0.01)
