"""Models of transformers, unmodified: what describes them, what their attention calls, what they do with labels.

Everything here reads strings and modules of a model. transformers itself is imported by the user's script, if at all.
"""

from shoal.models.huggingface.adapt import adapt
from shoal.models.huggingface.describe import describe, register_head_last
from shoal.models.huggingface.experts import install as install_experts
from shoal.models.huggingface.experts import written_out
from shoal.models.huggingface.labels import shifts_labels
from shoal.models.huggingface.pretrained.data.check_data import check_data, check_language_model
from shoal.models.huggingface.pretrained.data.random_batch import random_batch
from shoal.models.huggingface.pretrained.weights import weights_of

__all__ = [
    "adapt",
    "check_data",
    "check_language_model",
    "describe",
    "install_experts",
    "random_batch",
    "register_head_last",
    "shifts_labels",
    "weights_of",
    "written_out",
]
