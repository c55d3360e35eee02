"""Numba twins of the functions in layers and attention, same names and signatures. Importing this imports Numba."""

from npqwen.kernels_attend import attend
from npqwen.kernels_linear import linear, linears
from npqwen.kernels_pointwise import rms_norm, rope, swiglu

__all__ = ["attend", "linear", "linears", "rms_norm", "rope", "swiglu"]
