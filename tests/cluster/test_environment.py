import pytest

from hpcdl.cluster.environment import placement


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, ("mpich", 1, 4, 1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, ("openmpi", 2, 3, 0, 1)),
        (
            {
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "3",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            },
            ("slurm", 3, 4, 1, 2),
        ),
    ],
)
def test_each_launcher_is_recognised(environment: dict[str, str], expected: tuple[str, int, int, int, int]) -> None:
    found = placement(environment)
    assert found is not None
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == expected


def test_outside_any_launcher_there_is_no_placement() -> None:
    assert placement({}) is None


def test_a_batch_script_is_no_rank() -> None:
    batch = {"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert placement(batch) is None
