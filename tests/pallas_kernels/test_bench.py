"""What the bench refuses before it compiles or makes anything."""

import pytest

from pallas_kernels import bench


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["expert_dispatch", "--shape=7,2,3,5,6,4"], "P is 4, must be 3"),
        (["expert_dispatch", "--here", "--shape=7,5,3,5,6,2"], "A is 5, at most E = 3"),
        (["bounded_decay", "--shape="], "expected 5 numbers B,T,H,K,V above 0"),
        (["bounded_decay", "--shape=1,2,3"], "expected 5 numbers"),
        (["bounded_decay", "--here", "--shape=1,99999999999999,96,128,128"], " GB, twice"),
        (["bounded_decay", "--here", "--chip=v6e"], "--here times this machine"),
    ],
)
def test_a_case_that_cannot_be_is_refused(argv, says, capsys) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit):
        bench.main(argv)
    assert says in capsys.readouterr().err
