"""Fixtures of the node's tests (topologies and engines) are available to tests of the search too."""

from tests.node.conftest import gpu_node as gpu_node
from tests.node.conftest import machine as machine
from tests.node.conftest import openmp as openmp
from tests.node.conftest import stock as stock
