"""The topologies and engines of the node's tests serve the search's too."""

from tests.node.conftest import gpu_node as gpu_node
from tests.node.conftest import machine as machine
from tests.node.conftest import openmp as openmp
from tests.node.conftest import stock as stock
