"""Every environment variable of hpcdl's own: its name, who sets it, and what it says. No other file spells one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "HPCDL_"

ADDRESS = f"{PREFIX}ADDRESS"
BINDING = f"{PREFIX}CPUS_BY_LOCAL_RANK"
DATA_FORMAT = f"{PREFIX}DATA_FORMAT"
HOSTFILE = f"{PREFIX}HOSTFILE"
INTER_OP = f"{PREFIX}INTER_OP_THREADS"
INTRA_OP = f"{PREFIX}INTRA_OP_THREADS"
LAUNCH = f"{PREFIX}LAUNCH"
LAUNCHED_BY = f"{PREFIX}LAUNCHED_BY"
LAUNCHER = f"{PREFIX}LAUNCHER"
MACHINE = f"{PREFIX}MACHINE"
MEMORY_POLICY = f"{PREFIX}MEMORY_POLICY"
NODE_STORAGE = f"{PREFIX}NODE_STORAGE"
PRELOAD_PATH = f"{PREFIX}PRELOAD_PATH"
PROFILE = f"{PREFIX}PROFILE"
RANK = f"{PREFIX}RANK"
ROOT = f"{PREFIX}ROOT"
SHARE = f"{PREFIX}SHARE"
SITE_CONFIG = f"{PREFIX}SITE_CONFIG"
SIZE = f"{PREFIX}SIZE"
SRUN_MPI = f"{PREFIX}SRUN_MPI"
STATUS_DIR = f"{PREFIX}STATUS_DIR"
STOP_AT = f"{PREFIX}STOP_AT"
TRIAL = f"{PREFIX}TRIAL"
VERBOSE = f"{PREFIX}VERBOSE"
VERSION = f"{PREFIX}VERSION"
WITHOUT_MPI = f"{PREFIX}WITHOUT_MPI"


@dataclass(frozen=True)
class Variable:
    """Who sets a variable, and what it says."""

    set_by: str
    meaning: str


USER, SITE, MODULE, JOB, HPCDL = "user", "site", "modulefile", "job script", "hpcdl, for its ranks"
VARIABLES: Mapping[str, Variable] = {
    ADDRESS: Variable(USER, "address of this node at which other nodes reach it, to pick an interface"),
    HOSTFILE: Variable(USER, "file of hosts on which mpiexec starts the ranks"),
    LAUNCHER: Variable(USER, "launcher to use where several would fit; job scripts set it too"),
    MACHINE: Variable(USER, "name of the machine in records, in place of the node's"),
    SRUN_MPI: Variable(USER, "word behind `srun --mpi=` where the MPI was built for another interface"),
    VERBOSE: Variable(USER, "show tracebacks and TensorFlow's own log, as `-v` does"),
    NODE_STORAGE: Variable(SITE, "a node's own storage, in place of `$TMPDIR`"),
    PRELOAD_PATH: Variable(SITE, "further folders, colon between them, from which allocators may be preloaded"),
    ROOT: Variable(MODULE, "the installed tree"),
    SHARE: Variable(MODULE, "folder with machines, jobs, examples, schemas and references"),
    SITE_CONFIG: Variable(MODULE, "the centre's settings, `site.toml`"),
    VERSION: Variable(MODULE, "the installed version"),
    STOP_AT: Variable(JOB, "Unix time at which a run saves and leaves"),
    BINDING: Variable(HPCDL, "CPUs of each local rank, as JSON"),
    DATA_FORMAT: Variable(HPCDL, "NCHW or NHWC"),
    INTER_OP: Variable(HPCDL, "TensorFlow's inter-op threads"),
    INTRA_OP: Variable(HPCDL, "TensorFlow's intra-op threads"),
    LAUNCH: Variable(HPCDL, "a word that every process of one launch bears"),
    LAUNCHED_BY: Variable(HPCDL, "the supervising process, which its ranks do not outlive"),
    MEMORY_POLICY: Variable(HPCDL, "memory that a rank binds itself to"),
    PROFILE: Variable(HPCDL, "file of the node profile in use"),
    RANK: Variable(HPCDL, "number of a rank that is started without MPI"),
    SIZE: Variable(HPCDL, "how many ranks are started without MPI"),
    STATUS_DIR: Variable(HPCDL, "folder for the ranks' status files"),
    TRIAL: Variable(HPCDL, "a word that every process of one search or sweep bears"),
    WITHOUT_MPI: Variable(HPCDL, "set for ranks that find each other by other means than MPI"),
}
"""In the order in which the site guide lists them."""


def table() -> str:
    """The variables as a Markdown table."""
    rows = [f"| `{name}` | {variable.set_by} | {variable.meaning} |" for name, variable in VARIABLES.items()]
    return "\n".join(["| variable | set by | what it says |", "|---|---|---|", *rows])
