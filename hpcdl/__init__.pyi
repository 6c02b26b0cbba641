from hpcdl import data as data
from hpcdl.training.keras.callbacks import callbacks as callbacks
from hpcdl.training.keras.optimizer import DistributedOptimizer as DistributedOptimizer
from hpcdl.training.keras.optimizer import load_model as load_model
from hpcdl.training.keras.primitives import Average as Average
from hpcdl.training.keras.primitives import Max as Max
from hpcdl.training.keras.primitives import Mean as Mean
from hpcdl.training.keras.primitives import Min as Min
from hpcdl.training.keras.primitives import Product as Product
from hpcdl.training.keras.primitives import Sum as Sum
from hpcdl.training.keras.primitives import allgather as allgather
from hpcdl.training.keras.primitives import allgather_object as allgather_object
from hpcdl.training.keras.primitives import allreduce as allreduce
from hpcdl.training.keras.primitives import alltoall as alltoall
from hpcdl.training.keras.primitives import barrier as barrier
from hpcdl.training.keras.primitives import broadcast as broadcast
from hpcdl.training.keras.primitives import broadcast_object as broadcast_object
from hpcdl.training.keras.primitives import broadcast_variables as broadcast_variables
from hpcdl.training.keras.primitives import grouped_allreduce as grouped_allreduce
from hpcdl.training.keras.primitives import join as join
from hpcdl.training.keras.primitives import reducescatter as reducescatter
from hpcdl.training.keras.process_set import ProcessSet as ProcessSet
from hpcdl.training.keras.session import init as init
from hpcdl.training.keras.session import is_initialized as is_initialized
from hpcdl.training.keras.session import local_rank as local_rank
from hpcdl.training.keras.session import local_size as local_size
from hpcdl.training.keras.session import node_rank as node_rank
from hpcdl.training.keras.session import rank as rank
from hpcdl.training.keras.session import shutdown as shutdown
from hpcdl.training.keras.session import size as size
from hpcdl.training.keras.tape import DistributedGradientTape as DistributedGradientTape

__version__: str
__all__: list[str]
