"""Numba twins of the functions in layers and attention, same names and signatures. Importing this imports Numba."""

import npqwen.jit  # first: it takes note of the kernels' sources before they are read  # noqa: F401
from npqwen.kernels_attend import attend
from npqwen.kernels_linear import linear, linears
from npqwen.kernels_pointwise import rms_norm, rope, swiglu

__all__ = ["attend", "linear", "linears", "rms_norm", "rope", "swiglu"]
