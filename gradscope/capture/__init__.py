"""Hooks that record activations and their gradients, and the exact engine for token gradients that is built on them."""

from gradscope.capture.hooks import capture_activations, capture_gradients, forward_hooks, measuring
from gradscope.capture.products import Precision
from gradscope.capture.self_check import SelfCheck, check_engine
from gradscope.capture.stack import SequenceTokens
from gradscope.capture.token_gradients import TokenGradientMeter, TokenGradients

__all__ = [
    "Precision",
    "SelfCheck",
    "SequenceTokens",
    "TokenGradientMeter",
    "TokenGradients",
    "capture_activations",
    "capture_gradients",
    "check_engine",
    "forward_hooks",
    "measuring",
]
