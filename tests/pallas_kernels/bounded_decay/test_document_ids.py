"""Numbering the documents of a packed row."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bounded_decay import document_ids


@pytest.mark.parametrize(
    ("segments", "documents"),
    [
        ([1, 1, 1], [1, 1, 1]),
        ([1, 2, 1], [1, 2, 3]),
        ([5, 5, 0, 5], [1, 1, 0, 1]),
        ([0, 0, 7, 7], [0, 0, 1, 1]),
        ([0, 0], [0, 0]),
        ([3, 0, 4, 0], [1, 0, 2, 0]),
    ],
)
def test_document_ids(segments: list[int], documents: list[int]) -> None:
    np.testing.assert_array_equal(document_ids(jnp.array([segments])), [documents])


@pytest.mark.parametrize("bad", [jnp.zeros(3, jnp.int32), jnp.zeros((1, 0), jnp.int32), [[1]]])
def test_other_ids_are_refused(bad) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"expected int32 \[B,T\]"):
        document_ids(bad)
