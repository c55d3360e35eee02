"""e^x as plain float32 arithmetic, so that loops over it vectorise; a call of the C library's would not."""

import numpy as np

from npqwen.jit import jit


@jit(exact=True)
def exp(x):
    """e^x, float32, within 1 ulp for -87 < x <= 88, where it is cut off; 0 below -88; NaN for NaN.

    x = n ln 2 + r: adding 1.5 * 2^23 rounds x / ln 2 to the integer n and leaves it in the low bits of the sum; ln 2 is
    taken off in two parts, the first short enough that n times it is exact. e^r = 1 + r + r^2 p(r), p fitted to the
    least relative error for |r| <= ln 2 / 2 (3e-9). 2^n is put together from its bits, and n = -127 gives 0.
    """
    x = np.float32(-88) if x < np.float32(-88) else x
    x = np.float32(88) if x > np.float32(88) else x
    shifted = x * np.float32(1.4426950408889634) + np.float32(12582912)
    n = shifted - np.float32(12582912)
    r = x - n * np.float32(0.693359375)
    r = r - n * np.float32(-0.00021219444005471377)
    p = np.float32(0.0013814539415761828)
    p = p * r + np.float32(0.00836874544620514)
    p = p * r + np.float32(0.04166838899254799)
    p = p * r + np.float32(0.1666652113199234)
    p = p * r + np.float32(0.4999999403953552)
    power = np.int32((np.float32(shifted).view(np.int32) << 23) + 0x3F800000)
    return (p * r * r + r + np.float32(1)) * power.view(np.float32)
