"""Probabilities as whole numbers, so that what top-p adds up comes out the same on every device, in any order."""

from __future__ import annotations

from torch import Tensor

# 2^x on [0, 1) as a polynomial, the coefficient of x first, all exact in float32: relative error 1e-7.
POWER = (
    0.6931470632553101,
    0.2402293086051941,
    0.055485282093286514,
    0.009675451554358006,
    0.0012467843480408192,
    0.00021612923592329025,
)
LOG2_E = 1.4426950216293335
# The probability of a row's likeliest id has this many bits, so that of an id more than 28 below it is 0.
PROBABILITY_BITS = 40
ZERO_BELOW = 28.0


def integer_probabilities(below: Tensor) -> Tensor:
    """How likely ids are beside the likeliest of their row, as whole numbers: e^below * 2^40, int64.

    below: float32, at most 0: how far each logit lies under the largest. Sums of whole numbers are exact, and every
    operation here is correctly rounded in float32, so no device and no order of summation can move the border of top-p.
    """
    power = below.clamp(min=-64.0) * LOG2_E
    whole = power.floor()
    fraction = power - whole
    value = fraction * POWER[5] + POWER[4]
    for coefficient in (*POWER[3::-1], 1.0):
        value = value * fraction + coefficient
    return ((value * 2.0**23).long() << (PROBABILITY_BITS - 23)) >> (-whole).long().clamp(0, 62)
