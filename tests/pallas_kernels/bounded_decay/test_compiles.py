"""The kernels compiled by the real TPU compiler at production shapes: VMEM and temporaries."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot, schedule
from pallas_kernels.bounded_decay import cases

SLOW = pytest.mark.slow
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu, which has wheels for Linux only (extra [plan])",
)


@pytest.mark.parametrize(
    ("chip", "T"),
    [("v5p", 65536), pytest.param("v5p", 8192, marks=SLOW), pytest.param("v6e", 65536, marks=SLOW)],
)
def test_gradient_at_full_width(chip, T):
    """96 heads of 128: 0.62 GB of temporaries were measured for 8,192 tokens; they grow with T."""
    shape = cases.Shape(B=1, T=T, H=96, K=128, V=128)
    f = cases.function_of("pallas", "forward+backward")
    compiled = aot.compile_for(chip, f, *cases.arguments(shape, jnp.bfloat16))
    assert len(schedule.kernel_names(compiled.as_text())) == 2
    assert compiled.memory_analysis().temp_size_in_bytes < 0.7e9 * T / 8192


@pytest.mark.parametrize(
    ("heads", "K", "V", "dtype"),
    [(1, 128, 128, jnp.bfloat16), (3, 64, 96, jnp.float32), (8, 256, 256, jnp.float32)],
)
def test_other_widths_compile(heads, K, V, dtype):
    shape = cases.Shape(B=2, T=200, H=heads, K=K, V=V)
    f = cases.function_of("pallas", "forward+backward")
    aot.compile_for("v5p", f, *cases.arguments(shape, dtype))


@SLOW
def test_slot_attention_compiles():
    from pallas_kernels.bounded_decay import slot_attention

    wide, slots = (jax.ShapeDtypeStruct((1, 256, 4, width), jnp.bfloat16) for width in (128, 256))
    gate = jax.ShapeDtypeStruct(slots.shape, jnp.float32)

    def f(*args):
        o, pull = jax.vjp(lambda *a: slot_attention(*a, implementation="pallas")[0], *args)
        return pull(o)

    compiled = aot.compile_for("v5p", f, wide, wide, wide, slots, gate)
    # Two passes; the one that reads across the slots is itself the pullback of a recurrence.
    assert len(schedule.kernel_names(compiled.as_text())) == 6


def test_none_is_the_kernel_where_the_trace_is_for_a_tpu():
    from pallas_kernels.bounded_decay import bounded_decay

    q, _, v, g, beta, _ = (
        jax.ShapeDtypeStruct((a.shape[0], a.shape[2], a.shape[1], *a.shape[3:]), a.dtype)
        for a in cases.arguments(cases.Shape(1, 128, 2, 128, 128), jnp.bfloat16)
    )
    compiled = aot.compile_for("v5p", lambda *a: bounded_decay(*a)[0], q, q, v, g, beta)
    assert len(schedule.kernel_names(compiled.as_text())) == 1


def test_an_unknown_chip_is_named():
    with pytest.raises(ValueError, match="chip 'v4' is unknown; choose one of v5p, v6e"):
        aot.mesh("v4")
