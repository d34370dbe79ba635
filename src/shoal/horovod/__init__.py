"""Horovod's interface for PyTorch on torch.distributed: `import shoal.horovod as hvd`.

Horovod does not build on today's torch. A script that was written for it changes one import. Collectives are matched by
name, so ranks may call them in different orders, as Horovod allows and torch.distributed does not.
"""

from __future__ import annotations

from shoal.horovod import elastic as elastic
from shoal.horovod.basics import ccl_built as ccl_built
from shoal.horovod.basics import cross_rank as cross_rank
from shoal.horovod.basics import cross_size as cross_size
from shoal.horovod.basics import cuda_built as cuda_built
from shoal.horovod.basics import ddl_built as ddl_built
from shoal.horovod.basics import gloo_built as gloo_built
from shoal.horovod.basics import gloo_enabled as gloo_enabled
from shoal.horovod.basics import init as init
from shoal.horovod.basics import is_homogeneous as is_homogeneous
from shoal.horovod.basics import is_initialized as is_initialized
from shoal.horovod.basics import local_rank as local_rank
from shoal.horovod.basics import local_size as local_size
from shoal.horovod.basics import mpi_built as mpi_built
from shoal.horovod.basics import mpi_enabled as mpi_enabled
from shoal.horovod.basics import mpi_threads_supported as mpi_threads_supported
from shoal.horovod.basics import nccl_built as nccl_built
from shoal.horovod.basics import rank as rank
from shoal.horovod.basics import rocm_built as rocm_built
from shoal.horovod.basics import shutdown as shutdown
from shoal.horovod.basics import size as size
from shoal.horovod.basics import start_timeline as start_timeline
from shoal.horovod.basics import stop_timeline as stop_timeline
from shoal.horovod.collectives.allgather import allgather as allgather
from shoal.horovod.collectives.allgather import allgather_async as allgather_async
from shoal.horovod.collectives.allgather import grouped_allgather as grouped_allgather
from shoal.horovod.collectives.allgather import grouped_allgather_async as grouped_allgather_async
from shoal.horovod.collectives.allreduce import allreduce as allreduce
from shoal.horovod.collectives.allreduce import allreduce_ as allreduce_
from shoal.horovod.collectives.allreduce import allreduce_async as allreduce_async
from shoal.horovod.collectives.allreduce import allreduce_async_ as allreduce_async_
from shoal.horovod.collectives.allreduce import grouped_allreduce as grouped_allreduce
from shoal.horovod.collectives.allreduce import grouped_allreduce_ as grouped_allreduce_
from shoal.horovod.collectives.allreduce import grouped_allreduce_async as grouped_allreduce_async
from shoal.horovod.collectives.allreduce import grouped_allreduce_async_ as grouped_allreduce_async_
from shoal.horovod.collectives.allreduce import sparse_allreduce_async as sparse_allreduce_async
from shoal.horovod.collectives.alltoall import alltoall as alltoall
from shoal.horovod.collectives.alltoall import alltoall_async as alltoall_async
from shoal.horovod.collectives.broadcast import broadcast as broadcast
from shoal.horovod.collectives.broadcast import broadcast_ as broadcast_
from shoal.horovod.collectives.broadcast import broadcast_async as broadcast_async
from shoal.horovod.collectives.broadcast import broadcast_async_ as broadcast_async_
from shoal.horovod.collectives.reducescatter import grouped_reducescatter as grouped_reducescatter
from shoal.horovod.collectives.reducescatter import grouped_reducescatter_async as grouped_reducescatter_async
from shoal.horovod.collectives.reducescatter import reducescatter as reducescatter
from shoal.horovod.collectives.reducescatter import reducescatter_async as reducescatter_async
from shoal.horovod.collectives.waiting import barrier as barrier
from shoal.horovod.collectives.waiting import join as join
from shoal.horovod.collectives.waiting import poll as poll
from shoal.horovod.collectives.waiting import synchronize as synchronize
from shoal.horovod.compression import Compression as Compression
from shoal.horovod.errors import HorovodInternalError as HorovodInternalError
from shoal.horovod.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from shoal.horovod.install import install as install
from shoal.horovod.objects import allgather_object as allgather_object
from shoal.horovod.objects import broadcast_object as broadcast_object
from shoal.horovod.objects import broadcast_optimizer_state as broadcast_optimizer_state
from shoal.horovod.objects import broadcast_parameters as broadcast_parameters
from shoal.horovod.optimizer.distributed import DistributedOptimizer as DistributedOptimizer
from shoal.horovod.process_sets import ProcessSet as ProcessSet
from shoal.horovod.process_sets import add_process_set as add_process_set
from shoal.horovod.process_sets import global_process_set as global_process_set
from shoal.horovod.process_sets import remove_process_set as remove_process_set
from shoal.horovod.reduce_ops import Adasum as Adasum
from shoal.horovod.reduce_ops import Average as Average
from shoal.horovod.reduce_ops import Max as Max
from shoal.horovod.reduce_ops import Min as Min
from shoal.horovod.reduce_ops import Product as Product
from shoal.horovod.reduce_ops import Sum as Sum
from shoal.horovod.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
