import pytest

from hpcdl.cluster.environment import Placement, placement, unused_components


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


def test_a_task_of_flux_knows_its_node() -> None:
    """A Flux task is placed by the variables of flux-environment(7), although PMI_RANK and PMI_SIZE are set too."""
    task = {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"}
    found = placement({**task, "PMI_RANK": "5", "PMI_SIZE": "8"})
    assert found == Placement(launcher="flux", rank=5, size=8, local_rank=1, local_size=4)
    inside = placement({**task, "PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"})
    assert inside is not None and inside.launcher == "mpich" and inside.size == 2


def test_components_without_ranks_are_said() -> None:
    assert "this job has 2 components" in unused_components({"SLURM_HET_SIZE": "2"})
    assert unused_components({"SLURM_JOB_ID": "7"}) == "" == unused_components({"SLURM_HET_SIZE": "1"})
