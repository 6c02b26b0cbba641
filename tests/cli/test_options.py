"""Checks that commands make before they start ranks: hpcdl/cli/options.py."""

from __future__ import annotations

import pytest

from hpcdl.cli.options import begin
from hpcdl.config.load import Layer, ResolvedConfig, load
from hpcdl.config.schema import TrainConfig


def settings(**values: object) -> ResolvedConfig[TrainConfig]:
    return load(TrainConfig, [Layer(origin="flag", values={"model": "lenet", "data": "synthetic:mnist", **values})])


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_an_environment_is_not_staged_where_ranks_run_already(
    rank: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"PMI_RANK": rank, "PMI_SIZE": "2", "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": "2"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    place = begin(settings(**{"stage-env": True}), quiet=False)
    assert place is not None and place.rank == int(rank)
    assert capsys.readouterr().err.count("warning: --stage-env does nothing here, because mpich has started") == lines
    begin(settings(), quiet=False)
    assert capsys.readouterr().err == ""
