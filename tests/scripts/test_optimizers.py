"""Every Keras optimizer and every way to exchange gradients: two and three ranks equal one process.

The selected cases run inside one job for each number of ranks; the rest of the table runs as soak.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from hpcdl.strategies.table import listed_strategies
from tests.conftest import CommandLine
from tests.scripts.scripts import HERE, cases_of, keys_of, run_script, succeed

pytestmark = pytest.mark.mpi
SCRIPT = "optimizer_cases.py"
OPTIMIZERS, SETTINGS, EXCHANGES = (keys_of(SCRIPT, table) for table in ("OPTIMIZERS", "SETTINGS", "DISTRIBUTED"))
CASES = [
    *(f"optimizer_{name}" for name in OPTIMIZERS),
    *(f"adam_with_{name}" for name in SETTINGS),
    *(f"sparse_sgd_with_{name}" for name in SETTINGS if name != "loss_scale_factor"),
    *(f"sparse_{name}" for name in ("SGD", "Adam", "Adagrad", "RMSprop", "Ftrl")),
    *(f"exchange_{name}" for name in (*EXCHANGES, "fp16", "bf16")),
    *(f"strategy_{info.name}" for info in listed_strategies() if not info.features.periodic),
    *(f"compressed by {name}" for name in ("int8", "topk:5%", "powersgd:2")),
    *cases_of(SCRIPT, r"^@case\ndef (\w+)"),
]
QUICK: dict[int, set[str]] = {
    2: {
        "optimizer_Adam",
        "sparse_Adam",
        "exchange_samples",
        "accumulated_gradients_are_exchanged_once",
        "sample_weights",
        "twenty_steps_of_sgd_and_momentum_equal_one_process",
        "twenty_steps_of_adam_equal_plain_tensorflow_on_the_same_parts",
        "a_loaded_model_with_its_state",
        "an_own_apply_is_warned_of_once",
        "a_dynamic_loss_scale_skips_on_all_ranks",
        "a_dynamic_loss_scale_skips_the_steps_of_one_process",
        "what_differs_between_ranks_is_told",
        "weights_that_drift_apart_are_told",
        "not_a_number_ends_the_step",
        "what_does_not_go_is_refused",
        "every_optimizer_of_keras_has_a_case",
        "unequal_steps_with_join",
        "strategy_ps",
        "compressed by int8",
        "compressed by topk:5%",
        "compressed by powersgd:2",
        "what_compression_leaves_over_is_saved_and_resumed",
        "two_optimizers_keep_a_rest_each",
        "another_model_may_be_deleted",
        "a_center_is_what_is_seen_and_kept",
        "a_center_is_saved_and_resumed",
        "what_a_center_does_not_have_is_refused",
        *(f"strategy_{info.name}" for info in listed_strategies() if not info.features.keras_fit),
    },
    3: set(),
}
"""Cases of `make test-all` by ranks; test_tutorials.py has a loop with a tape, test_primitives.py process sets."""
Results = Callable[[int], list[dict[str, str]]]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    """What each of `ranks` ranks reports for each selected case."""
    reported: dict[int, list[dict[str, str]]] = {}

    def of(ranks: int) -> list[dict[str, str]]:
        if ranks not in reported:
            chosen = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
            names = [call.params["case"] for call in chosen if call is not None and call.params["ranks"] == ranks]
            folder = tmp_path_factory.mktemp("optimizers")
            ended = run_script(session_hpcdl, HERE / SCRIPT, folder, *names, ranks=ranks, cwd=folder, timeout_s=1500)
            succeed(ended)
            assert "AutoGraph could not" not in ended.err, "what is called in a graph is left as it is"
            reported[ranks] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        return reported[ranks]

    return of


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        pytest.param(ranks, case, marks=() if case in quick else pytest.mark.soak)
        for ranks, quick in QUICK.items()
        for case in CASES
    ],
)
def test_ranks_end_where_one_process_does(ranks: int, case: str, results: Results) -> None:
    for rank, reported in enumerate(results(ranks)):
        if case not in reported:
            pytest.skip("this Keras has no such optimizer")
        assert reported[case] == "", f"rank {rank}: {reported[case]}"


@pytest.mark.long
def test_what_is_quick_is_a_case() -> None:
    assert set().union(*QUICK.values()) <= set(CASES)
