"""Keys and values from other slots or workers: what a ring is said to do, and the gradient of such a forward pass."""

import dataclasses

import numpy as np
import pytest
from conformance.readout.tiled_ring import TiledRing

from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.readout.model.backward import gradient_of_forward
from ringspec.conformance.readout.model.ring import Model
from ringspec.conformance.readout.problem.geometry import Geometry, positions
from ringspec.conformance.readout.problem.pairs import Pairs
from ringspec.conformance.readout.proof.replay import explains

pytestmark = pytest.mark.usefixtures("no_catalogue")

WORKERS, HEADS, GROUP, SLOTS, DIM, SCALE = 3, 4, 2, 4, 3, 0.7
KEY_HEAD = np.arange(HEADS) // GROUP
WORKER, OWNER, HEAD, QUERY, KEY = np.indices((WORKERS, WORKERS, HEADS, SLOTS, SLOTS))
LAST = (WORKER - OWNER) % WORKERS == WORKERS - 1


def of_next_step(call, r, b):
    """Return the worker whose values a step uses if the next ones arrive before, which they do not in the last step."""
    last = (r - b) * call.direction % call.workers == call.workers - 1
    return b if last else (b - call.direction) % call.workers


@pytest.mark.parametrize(
    ("passes", "sentences"),
    [
        (("forward",), ["In the forward pass, {}."]),
        pytest.param(("backward",), ["In the backward pass, {}."], marks=pytest.mark.slow),
        pytest.param(
            ("forward", "backward"),
            ["In the forward pass, {}.", "The backward pass does the same."],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["forward", "backward", "both"],
)
def test_values_of_the_next_step_are_named_with_and_without_a_mask(passes, sentences):
    ring = TiledRing(only_causal=False, passes=passes, values_of=of_next_step)
    told = explain_target(ring)
    assert told.conclusion.explained == (
        "readout/causal-contiguous-kv",
        "readout/full-contiguous-kv",
    )
    words = "in all but the last step, values are those of the next step's visitor"
    assert list(told.sentences) == [one.format(words) for one in sentences]


def test_the_gradient_of_a_forward_pass_with_keys_of_wrong_slots_is_said_to_be_right_for_it():
    ring = TiledRing(("striped",), one_later=True)
    told = explain_target(ring)
    assert told.conclusion.explained == ("readout/causal-striped-kv",)
    assert told.sentences == (
        "In the forward pass, for keys of later workers, keys and values are taken from the next slot (in the last slot, from the first).",
        "The backward pass is the gradient of this wrong forward pass.",
    )
    # The same sentences account for a call with random inputs.
    call = told.runs[0].problem.proof
    result = ring.run(call)
    outputs = {name: getattr(result, name) for name in ("o", "lse", "dq", "dk", "dv")}
    assert explains(told.conclusion, [call], [outputs])
    outputs["dk"] = [x.copy() for x in outputs["dk"]]
    outputs["dk"][0][0, 0, 3, 5] += 0.1
    assert not explains(told.conclusion, [call], [outputs])


@dataclasses.dataclass(frozen=True)
class Dense:
    """Attention in float64 in which pair [a, b, h, i, j] reads k and v in any slot of any worker.

    ``k_at`` and ``v_at`` are that worker and slot, [W, W, H, n, n].
    """

    hidden: np.ndarray
    k_at: tuple[np.ndarray, np.ndarray]
    v_at: tuple[np.ndarray, np.ndarray]

    def goal(self, q, k, v, dy):
        """Return <dy, o>, summed over all queries."""
        (k_worker, k_slot), (v_worker, v_slot) = self.k_at, self.v_at
        keys = k[k_worker, KEY_HEAD[HEAD], k_slot]
        s = SCALE * np.einsum("ahid,abhijd->abhij", q, keys)
        p = np.where(self.hidden, 0.0, np.exp(s))
        p /= p.sum(axis=(1, 4), keepdims=True)
        o = np.einsum("abhij,abhijd->ahid", p, v[v_worker, KEY_HEAD[HEAD], v_slot])
        return (dy * o).sum()

    def gradient(self, inputs, name):
        """Return dq, dk or dv by central differences."""
        found, step = np.zeros_like(inputs[name]), 1e-5
        for at in np.ndindex(found.shape):
            value = []
            for sign in (1, -1):
                x = inputs[name].copy()
                x[at] += sign * step
                value.append(self.goal(**{**inputs, name: x}))
            found[at] = (value[0] - value[1]) / (2 * step)
        return found


MOVED = {
    "right": ((OWNER, KEY), (OWNER, KEY)),
    "values-of-the-next-step": ((OWNER, KEY), (np.where(LAST, OWNER, (OWNER - 1) % WORKERS), KEY)),
    "values-of-other-slots": ((OWNER, KEY), (OWNER, (KEY + 1) % SLOTS)),
    "keys-of-other-workers": ((np.where(OWNER > WORKER, 0, OWNER), KEY), (OWNER, KEY)),
    "both-of-other-slots": 2 * ((OWNER, np.where(OWNER > WORKER, (KEY + 1) % SLOTS, KEY)),),
}  # fmt: skip


@pytest.mark.parametrize("moved", MOVED)
def test_the_gradient_of_a_wrong_forward_pass_agrees_with_central_differences(moved):
    k_at, v_at = MOVED[moved]
    position = positions("striped", WORKERS, SLOTS)
    geometry = Geometry(WORKERS, "kv", 1, "striped", position, True, None, HEADS, GROUP, SCALE)
    visible = (position[:, None, :, None] >= position[None, :, None, :])[:, :, None]
    rng = np.random.default_rng(49)
    shape = {"q": HEADS, "k": HEADS // GROUP, "v": HEADS // GROUP, "dy": HEADS}
    inputs = {name: rng.normal(size=(WORKERS, x, SLOTS, DIM)) for name, x in shape.items()}
    s, g = (
        np.einsum("ahid,bcjd->cabhij", inputs[x], inputs[y]) for x, y in (("q", "k"), ("dy", "v"))
    )
    model = Model(Pairs(geometry, SCALE * s, g), [visible], [np.arange(geometry.tokens)])
    choices = model.right
    for name, (worker, slot) in (("k", k_at), ("v", v_at)):
        choices = choices.with_value(f"{name}.worker", worker != OWNER, worker)
        choices = choices.with_value(f"{name}.slot", slot != KEY, slot)
    found = gradient_of_forward(model, choices)
    of_head = inputs["k"][:, KEY_HEAD]
    grouped = (WORKERS, HEADS // GROUP, GROUP, SLOTS, DIM)
    gradients = {
        "q": SCALE * np.einsum("abhij,bhjd->ahid", found.ds_of_dq, of_head),
        "k": SCALE * np.einsum("abhij,ahid->bhjd", found.ds_of_dk, inputs["q"]),
        "v": np.einsum("abhij,ahid->bhjd", found.p, inputs["dy"]),
    }
    dense = Dense(~np.broadcast_to(visible, OWNER.shape), k_at, v_at)
    for name, x in gradients.items():
        total = x if name == "q" else x.reshape(grouped).sum(axis=2)
        np.testing.assert_allclose(total, dense.gradient(inputs, name), rtol=1e-5, atol=1e-6)
