"""RVQ: rows rotated, then quantised by codebooks made for what a rotation leaves, keys and values alike."""

from .codec import decode, encode
from .config import Rvq
from .reference import Encoded
from .store import RvqStore
from .trained_config import TrainedRvq

__all__ = ["Encoded", "Rvq", "RvqStore", "TrainedRvq", "decode", "encode"]
