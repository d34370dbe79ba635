"""Training that continues after a failure: state that is committed in memory, and a loop that restores it."""

from shoal.horovod.elastic.run import run as run
from shoal.horovod.elastic.sampler import ElasticSampler as ElasticSampler
from shoal.horovod.elastic.state import ObjectState as ObjectState
from shoal.horovod.elastic.state import State as State
from shoal.horovod.elastic.torch_state import TorchState as TorchState
