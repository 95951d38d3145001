"""Which targets of TransformerEngine's context parallelism exist, and what each of them claims.

A claim is what ``get_attention_backend`` of 2.20.2 and ``attn_forward_func_with_cp`` accept.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringspec.conformance.target.capabilities import Capabilities

__all__ = ["PAIR", "VARIANTS", "Variant", "claims"]

PAIR = 2  # workers that exchange heads, with a2a+p2p
MODES = {"p2p": "p2p", "all-gather": "all_gather", "a2a": "a2a", "a2a-p2p": "a2a+p2p"}
# Where p2p of 2.20.2 rounds over the stand-ins, which keep P and dS in float64, if nothing is compiled (NVTE_TORCH_COMPILE=0).
ROUNDINGS: dict[str, dict[str, str | int]] = {
    name: {"base": base, "p": "float32", "ds": "float32", "merge_recipe": "te_p2p_2_20"}
    for name, base in (("bfloat16", "bf16"), ("float16", "fp16"))
}
LAYOUTS = {"bshd": "zigzag", "sbhd": "zigzag", "thd": "zigzag_per_document"}


@dataclass(frozen=True)
class Variant:
    """A target: TransformerEngine's ``cp_comm_type``, the layout of the tokens, the attention and the format.

    ``backend``: 'fa2', 'fa3' (FlashAttention 2, 3) or 'fused' (FusedAttention). ``form``: ``qkv_format``.
    """

    mode: str
    layout: str = "zigzag"
    backend: str = "fa2"
    form: str = "bshd"

    @property
    def packed(self) -> bool:
        """Tell whether its tensors are packed documents."""
        return self.form == "thd"

    @property
    def padded(self) -> bool:
        """Tell whether documents may be padded: not with FlashAttention 2, or a2a+p2p with FlashAttention 3.

        The latter is not refused, but TransformerEngine's own tests say that it is not yet supported.
        """
        if not self.packed or self.layout == "contiguous":
            return False
        return self.backend == "fused" or (self.backend == "fa3" and self.mode != "a2a+p2p")

    @property
    def windows(self) -> bool:
        """Tell whether windows are accepted: not if keys circulate, or without load balancing."""
        return self.mode in ("a2a", "all_gather") and self.layout != "contiguous"

    @property
    def workers(self) -> tuple[int, ...]:
        """Return the claim of this name. With a2a, FusedAttention needs an even number of heads.

        a2a also runs with 8 workers; but few cases have so many key heads, and those with random settings would choose 8.
        """
        if self.mode == "a2a":
            return (2, 4) if self.backend == "fused" else (2, 3, 4)
        return (4, 8) if self.mode == "a2a+p2p" else (2, 3, 4, 8)

    @property
    def kv_heads_multiple(self) -> int | str:
        """Return the claim of this name."""
        multiples: dict[str, int | str] = {"a2a": "workers", "a2a+p2p": PAIR}
        return multiples.get(self.mode, 1)


def variants() -> dict[str, Variant]:
    """Return the targets by name. With FlashAttention 2, all_gather of documents has no load balancing."""
    found = {}
    for name, mode in MODES.items():
        found[name] = Variant(mode)
        layout = "contiguous" if mode == "all_gather" else LAYOUTS["thd"]
        found[f"{name}-thd"] = Variant(mode, layout, form="thd")
        for backend, forms in (("fa3", ("bshd", "thd")), ("fused", ("bshd", "sbhd", "thd"))):
            for form in forms:
                ending = "" if form == "bshd" else f"-{form}"
                found[f"{name}-{backend}{ending}"] = Variant(mode, LAYOUTS[form], backend, form)
    return found


VARIANTS = variants()


def claims(name: str) -> Capabilities:
    """Return what a target supports; ``name``: a key of VARIANTS.

    Only p2p of dense tensors declares a recipe: :data:`ROUNDINGS`. Packed documents have other merges (te_thd), a2a+p2p
    has blocks of two workers' tokens, and the others do not merge.
    """
    one = VARIANTS[name]
    masks = ("causal", *(["window"] if one.windows else []), *(["documents"] if one.packed else []))
    features = ("scale", *(["softcap"] if one.backend == "fa2" else []))
    return Capabilities(
        layouts=(one.layout,),
        # Whatever is sent, a worker's results are those of a ring.
        circulations=("kv",) if one.mode == "p2p" else ("kv", "gather"),
        directions=(1,),
        workers=one.workers,
        masks=masks,
        only_causal=one.layout == "contiguous",
        features=(*features, *(["padding-slots"] if one.padded else [])),
        formats=("bfloat16", "float16"),
        head_dims=tuple(range(8, 129 if one.backend == "fused" else 257, 8)),
        value_dims=tuple(range(8, 129, 8)) if one.backend == "fused" else None,
        value_dim_equals_head_dim=one.backend != "fused",
        tokens_multiple=1 if one.layout == "contiguous" else 2,
        kv_heads_multiple=one.kv_heads_multiple,
        batch=(1,) if one.packed else None,
        lse="hidden",
        recipe=ROUNDINGS if one.mode == "p2p" and not one.packed else None,
        axes="SBHD" if one.form == "sbhd" else "BSHD",
    )
