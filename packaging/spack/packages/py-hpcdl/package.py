"""spack repo add packaging/spack; spack develop --path $PWD py-hpcdl@main; spack install py-hpcdl."""

from spack.package import *


class PyHpcdl(PythonPackage):
    """Distributed deep learning for HPC centres: shard, tune, train over MPI, report."""

    # A checkout is the source: `spack develop` names it, until a release is on a server.
    version("main")
    version("0.3.0")

    maintainers("hpcdl")
    license("Apache-2.0", checked_by="hpcdl")

    variant("compression", default=True, description="Read compressed HDF5 files")
    variant("tensorboard", default=False, description="Write TensorBoard's event files")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("mpi", type="run")
    with default_args(type="run"):
        depends_on("py-google-crc32c@1.6:")
        depends_on("py-h5py@3.11:3")
        depends_on("py-keras@3.5:3")
        depends_on("py-matplotlib@3.9:3")
        depends_on("py-mpi4py@4.1:4")
        depends_on("py-msgspec@0.22:0")
        depends_on("py-numpy@1.26:2")
        depends_on("py-pillow@10.3:13")
        depends_on("py-protobuf@4.25:8")
        depends_on("py-rich@13.7:16")
        depends_on("py-scipy@1.13:1")
        depends_on("py-tensorflow@2.16:2")
        depends_on("py-threadpoolctl@3.5:3")
        depends_on("py-toml@0.10.2:0.10")
        depends_on("py-typer@0.21:0")
        depends_on("py-xxhash@3.4:4")
        depends_on("py-hdf5plugin@5:", when="+compression")
        depends_on("py-tensorboard@2.16:2", when="+tensorboard")
