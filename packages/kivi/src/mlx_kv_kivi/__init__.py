"""KIVI: keys quantised per channel, values per token (Liu et al., arXiv 2402.02750)."""

from .config import Kivi
from .quantize import dequantize_keys, dequantize_values, quantize_keys, quantize_values
from .reference import Quantized
from .store import KiviStore

__all__ = [
    "Kivi",
    "KiviStore",
    "Quantized",
    "dequantize_keys",
    "dequantize_values",
    "quantize_keys",
    "quantize_values",
]
