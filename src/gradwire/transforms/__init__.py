"""Codec in, codec out: error feedback, momentum correction, chains, rotation, warm-up."""

from gradwire.transforms.base import is_stateful
from gradwire.transforms.chain import Chain
from gradwire.transforms.feedback import EF21, ErrorFeedback, for_training
from gradwire.transforms.momentum import MomentumCorrection
from gradwire.transforms.rotation import Rotate
from gradwire.transforms.warmup import WarmUp

__all__ = ["EF21", "Chain", "ErrorFeedback", "MomentumCorrection", "Rotate", "WarmUp", "for_training", "is_stateful"]
