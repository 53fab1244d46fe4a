"""The sample that a layer leaves of its recurrence."""

import jax.numpy as jnp
import numpy as np

from mlmoe.layers import sample
from mlmoe.layers.sample import evenly, take_sample


def test_the_row_with_the_longest_last_document_and_its_last_head() -> None:
    document_BT = jnp.array([[1, 1, 1, 1, 2], [0, 0, 0, 0, 0], [1, 1, 2, 2, 2], [1, 2, 3, 0, 0]])
    x = jnp.arange(4 * 5 * 2 * 6.0).reshape(4, 5, 2, 6)
    beta_BTH, state = x[..., 0], jnp.swapaxes(x[:, :3], 1, 2)
    found = take_sample(document_BT, (x, x, x, x, beta_BTH), x, x, state)
    np.testing.assert_array_equal(found.document_T, document_BT[2])
    q, _, v, _, beta = found.inputs
    np.testing.assert_array_equal(q, x[2, :, 1])
    np.testing.assert_array_equal(v, x[2, :, 1, : sample.CHANNELS])
    np.testing.assert_array_equal(found.o_Tc, v)
    np.testing.assert_array_equal(beta, x[2, :, 1, 0])
    np.testing.assert_array_equal(found.state, x[2, :3, 1, : sample.CHANNELS])
    np.testing.assert_array_equal(found.g_NHK, x[2])


def test_decays_are_read_all_along_a_long_row() -> None:
    assert evenly(1).tolist() == [0] and evenly(5).tolist() == [0, 1, 2, 3, 4]
    at = evenly(100_000)
    assert len(at) == sample.TOKENS and (at[0], at[-1]) == (0, 99_999)
    assert np.ptp(np.diff(at)) <= 1
