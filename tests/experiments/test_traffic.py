"""The report on what experts send between chips."""

import importlib.util

import pytest

from experiments import traffic


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu, which has wheels for Linux only (extra [plan])",
)
def test_ragged_sends_rows_of_latent_width(capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--config=8k:small", "--topology=v5p:2x2x1", "--expert=4"]
    traffic.main([*where, "--tokens=32", "--transport=ragged", "--buffer=1.5"])
    told = capsys.readouterr().out
    # 32 tokens x 4 choices x 1.5 = 192 pairs, but no more rows than the 128 tokens of four chips.
    assert told.count("ragged-all-to-all    bf16[128,2,128]") == 4
    assert "ragged-all-to-all    s32[128,1,128]                  2,048 bytes a token" in told
    assert "temporaries 0.0" in told


def test_rows_a_token() -> None:
    assert traffic.rows_a_token(16, 2, 16) == pytest.approx(2.0)
    assert traffic.rows_a_token(16, 2, 1) == pytest.approx(1.0)
    assert traffic.rows_a_token(896, 16, 64) == pytest.approx(14.36, abs=0.01)
