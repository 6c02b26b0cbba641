"""The facts about the strategy that the command line needs; without TensorFlow."""

from hpcdl.strategies.base.strategy import Features, StrategyInfo

MEAN = StrategyInfo(
    name="acme-mean",
    family="all-reduce",
    summary="One MPI all-reduce per variable.",
    source="the centre's own",
    features=Features(equals_single=True, exact_resume=True),
    target="acme.mean:Mean",
)
