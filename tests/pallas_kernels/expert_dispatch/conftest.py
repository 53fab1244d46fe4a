"""Narrow blocks for kernels that are interpreted."""

import pytest

from pallas_kernels.expert_dispatch import blocks


@pytest.fixture
def narrow_blocks(monkeypatch):
    """8 columns instead of 128 and more: several blocks in every direction, and little padding."""
    monkeypatch.setattr(blocks, "LANES", 8)
    monkeypatch.setattr(blocks, "_widths", lambda width: [8])
