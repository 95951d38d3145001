"""float64 to 16 bits, rounded once, against fractions."""

from fractions import Fraction

import numpy as np
import pytest

from ringspec.standins.rounding import rounded

pytestmark = pytest.mark.torch

HARD = [
    1 + 2**-8 + 2**-40,
    1 + 2**-11 - 2**-50,
    1 + 3 * 2**-9,
    -(1 + 2**-8 + 2**-40),
    2**-25 + 2**-60,
]


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_each_number_goes_to_the_nearest_and_halves_to_even(name):
    import torch

    dtype = getattr(torch, name)
    rng = np.random.default_rng(7)
    wide = torch.tensor([*HARD, *(rng.standard_normal(300) * 2.0 ** rng.integers(-30, 12, 300))])
    wide = wide.double()
    middle = (wide.to(dtype).double() * (1 + torch.finfo(dtype).eps / 2)).float().double()
    for x in torch.cat((wide, middle, middle * (1 + 2.0**-50), middle * (1 - 2.0**-50))):
        got = rounded(x, dtype)
        bits = int(got.view(torch.int16))
        error = abs(Fraction(float(got)) - Fraction(float(x)))
        for step in (-1, 1):
            if bits + step < -(2**15):
                continue  # beside -0 there is no further number
            other = torch.tensor(bits + step, dtype=torch.int16).view(dtype)
            if not torch.isfinite(other):
                continue
            distance = abs(Fraction(float(other)) - Fraction(float(x)))
            assert error < distance or (error == distance and bits % 2 == 0), float(x)


def test_special_values_keep_their_meaning():
    import torch

    x = torch.tensor([np.inf, -np.inf, 0.0, -0.0, 1e300, -1e300, np.nan], dtype=torch.float64)
    got = rounded(x, torch.bfloat16)
    assert got[:6].tolist() == [np.inf, -np.inf, 0.0, 0.0, np.inf, -np.inf] and got[6].isnan()
    assert torch.signbit(got).tolist()[2:4] == [False, True]
