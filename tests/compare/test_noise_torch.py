"""The noise model against PyTorch's flash attention on the CPU, a kernel of which ringspec has no part.

Its source (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp) gives the recipe: key tiles of 512, query tiles
of 32, 64 or 256 by length; P and dS in the input type, sums in float32 *within* a tile; dq, dk and dv are
accumulated across tiles in the input type. Not in a recipe: in 16 bits its exp is a polynomial (exp_u20)
whose error (up to 7e-5) reaches lse, so lse is left out there; and the backward scales inside its product, so its scores
are the forward's bit for bit only where the scale is a power of two.
"""

import numpy as np
import pytest
from compare.noise_problems import attention_of, draw, truth

from ringspec.compare.noise.predict import predict
from ringspec.recipes import Recipe, recipe

pytestmark = pytest.mark.torch


def flash_recipe(dtype: str, n: int) -> Recipe:
    tile_q = 256 if n >= 768 else 64 if n >= 192 else 32
    base = recipe("float32" if dtype == "float32" else "bf16")
    return base.replace(
        name="flash on the CPU", tile_q=tile_q, tile_k=512, tile_dq=dtype, tile_dkv=dtype
    )


def flash(case, dtype: str) -> dict:
    """o, lse, dq, dk, dv of PyTorch's kernel."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kind = getattr(torch, dtype)
    causal = bool(case.options)
    q, k, v = (torch.tensor(x).to(kind).requires_grad_() for x in (case.q, case.k, case.v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        o.backward(torch.tensor(case.dy).to(kind))
    function = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    lse = function(q.detach(), k.detach(), v.detach(), 0.0, causal)[1]
    got = {"o": o, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {name: x.detach().double().numpy() for name, x in got.items()}


@pytest.mark.parametrize("spread", [0.3, 2.5, 6.0])
@pytest.mark.parametrize(
    ("n", "width", "heads", "causal"),
    [(128, 64, 2, True), (512, 64, 1, False), (768, 128, 1, True)],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_errors_of_flash_attention_are_as_large_as_predicted(
    dtype, n, width, heads, causal, spread
):
    used = flash_recipe(dtype, n)
    rng = np.random.default_rng(21)
    features = ("causal",) if causal else ()
    case = draw(
        rng, used, 1, n=n, width=width, heads=(heads, heads), spread=spread, features=features
    )
    attention = attention_of(case)
    noise = predict(attention, used, same_scores=width == 64, sequential=True)
    got = flash(case, dtype)
    for name, want in truth(attention).items():
        if name == "lse" and dtype != "float32":
            continue
        error, sd = got[name] - want, noise.sd[name]
        noisy = sd > 0
        ratio = np.sqrt(np.mean(((error - noise.mean[name])[noisy] / sd[noisy]) ** 2))
        assert 0.8 < ratio < 1.25, (name, ratio)
        assert np.all(np.abs(error) <= noise.bound[name]), name


def test_rounding_of_accumulators_between_tiles_is_seen():
    """Without tile_dq and tile_dkv in 16 bits the prediction is contradicted."""
    used = flash_recipe("bfloat16", 512)
    case = draw(np.random.default_rng(22), used, 1, n=512, width=64, heads=(1, 1), features=())
    attention = attention_of(case)
    error = flash(case, "bfloat16")["dv"] - truth(attention)["dv"]
    plain = predict(attention, "bf16").sd["dv"]
    assert np.sqrt(np.mean(error**2) / np.mean(plain**2)) > 1.25
