"""All implementations against the float64 reference: outputs, states and every gradient."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.bounded_decay import bounded_decay, chunked, op

DELTA = [
    "delta_plain",
    "delta_odd",
    "delta_floor",
    "delta_no_decay_same_keys",
    "delta_packed_63_65",
    "delta_packed_ragged_pad",
    "delta_one_token",
]
ADDITIVE = ["additive_plain", "additive_floor_packed", "additive_slow_long"]


def most_slow(*quick):
    """All cases, of which only these run without `-m slow`."""
    slow = pytest.mark.slow
    return [n if n in quick else pytest.param(n, marks=slow) for n in DELTA + ADDITIVE]


INPUTS = ("q", "k", "v", "g", "beta", "h0")


def _errors(case, error, dtype, implementation):
    """{'o', 'ht', 'dq', ...: relative error}; q, k, v and the cotangent of o in `dtype`."""
    delta = case["delta"]
    args = [jnp.asarray(case[n], dtype if n in "qkv" else jnp.float32) for n in INPUTS]
    segment_ids, scale = jnp.asarray(case["segment"]), float(case["scale"])

    def run(q, k, v, g, beta, h0):
        return bounded_decay(
            *(q, k, v, g, beta if delta else None),
            initial_state=h0,
            segment_ids=segment_ids,
            scale=scale,
            implementation=implementation,
        )

    # These tests spend their time compiling: skip LLVM's optimiser, the HLO is the same.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def everything(args, do, dht):
        (o, ht), vjp = jax.vjp(run, *args)
        return o, ht, *vjp((do, dht))

    got = everything(args, jnp.asarray(case["do"], dtype), jnp.asarray(case["dht"], jnp.float32))
    names = ["o", "ht", *("d" + n for n in INPUTS)]
    return {n: error(x, case[n]) for n, x in zip(names, got, strict=True) if delta or n != "dbeta"}


@pytest.fixture
def errors(golden, error):
    def measure(name, **kw):
        return _errors(golden(name) | {"delta": name in DELTA}, error, **kw)

    return functools.partial(measure)


def _assert_within(errors, output, gradient):
    limits = {n: output if n in ("o", "ht") else gradient for n in errors}
    assert not {n: e for n, e in errors.items() if not e < limits[n]}


@pytest.mark.parametrize("name", ["delta_floor", "delta_packed_63_65"])
def test_f32_with_chunks_of_128(errors, name):
    _assert_within(errors(name, dtype=jnp.float32, implementation="pallas"), 1e-5, 1e-4)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("implementation", ["ref", "chunked", "pallas"])
@pytest.mark.parametrize("name", DELTA + ADDITIVE)
def test_f32(errors, name, implementation):
    _assert_within(errors(name, dtype=jnp.float32, implementation=implementation), 1e-5, 1e-4)


def test_f32_with_several_tiles_a_chunk(errors, monkeypatch):
    """Wide heads take 64 tokens a chunk; the reference heads are narrow, so ask for it."""
    monkeypatch.setattr(chunked, "chunk_size", lambda K: 64)
    _assert_within(
        errors("delta_packed_63_65", dtype=jnp.float32, implementation="chunked"), 1e-5, 1e-4
    )


def test_bf16(errors):
    got = errors("delta_packed_ragged_pad", dtype=jnp.bfloat16, implementation="chunked")
    _assert_within(got, 5e-3, 2e-2)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", most_slow("delta_no_decay_same_keys", "delta_packed_ragged_pad"))
def test_bf16_kernel(errors, name):
    """With its 128 tokens a chunk: what is rounded inside one counts."""
    _assert_within(errors(name, dtype=jnp.bfloat16, implementation="pallas"), 5e-3, 2e-2)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("name", most_slow("delta_packed_ragged_pad", "additive_floor_packed"))
def test_no_races_and_nothing_uninitialised_is_read(errors, name, monkeypatch):
    """The TPU interpreter: memory starts as NaN, copies are asynchronous, races are looked for."""
    kernels = op.bounded_decay_pallas
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    monkeypatch.setattr(
        op, "bounded_decay_pallas", lambda *args, interpret: kernels(*args, interpret=params)
    )
    _assert_within(errors(name, dtype=jnp.float32, implementation="pallas"), 1e-5, 1e-4)
    try:  # jax 0.10 notes a race instead of raising
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
    except ImportError:
        return
    assert not getattr(getattr(interpreter, "races", None), "races_found", False)


def test_bf16_same_keys_is_no_worse_than_the_definition(errors):
    """Rounding k to bf16 alone moves dv and dbeta here, where 128 keys nearly coincide, by 2e-2."""
    got, ref = (
        errors("delta_no_decay_same_keys", dtype=jnp.bfloat16, implementation=i)
        for i in ("chunked", "ref")
    )
    assert {n: e for n, e in got.items() if e > 1.02 * ref[n]} == {}
    _assert_within(got, 5e-3, 3e-2)
