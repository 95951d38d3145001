"""Targets that are wrong in one way each, all of them the float32 reference otherwise."""

import ctypes
import dataclasses
import os
import sys
import time

import numpy as np

from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.target.protocol import RESULTS, Refused
from ringspec.conformance.targets.reference import Reference, reference_float32
from ringspec.recipes import RECIPES


class Faulty:
    """The reference, with its call changed before and its result changed behind."""

    def __init__(self, name, before=None, behind=None, recipe="float32", **claims):
        self.name = name
        self.inner = Reference(RECIPES[recipe], **claims)
        self.capabilities = self.inner.capabilities
        self.before, self.behind = before, behind

    def run(self, call):
        changed = call if self.before is None else self.before(call)
        result = self.inner.run(changed)
        if self.behind is not None:
            self.behind(result, call)
        return result


def rolled(result, call):
    if result.dk is not None:
        result.dk = result.dk[1:] + result.dk[:1]
        result.dv = result.dv[1:] + result.dv[:1]


def local_positions(call):
    if call.operation != "ring":
        return call
    slots_q = np.broadcast_to(np.arange(call.index_q.shape[1]), call.position_q.shape)
    slots_k = np.broadcast_to(np.arange(call.index_k.shape[1]), call.position_k.shape)
    return dataclasses.replace(call, position_q=slots_q, position_k=slots_k)


def without_sinks(call):
    if "sinks" not in call.tensors:
        return call
    gone = tuple(np.full_like(x, -1e30) for x in call.tensors["sinks"])
    return dataclasses.replace(call, tensors={**call.tensors, "sinks": gone})


def one_nan(result, call):
    if call.workers > 1:
        result.o[1] = result.o[1].copy()
        result.o[1][0, 0, 1, 2] = np.nan


def half(result, call):
    result.o = [x.astype(np.float16) for x in result.o]


def swapped(result, call):
    result.o = result.o[::-1]


def short(result, call):
    result.lse = [x[..., :-1] for x in result.lse]


def without_dv(result, call):
    result.dv = None


def one_worker_less(result, call):
    result.dq = result.dq[:-1]


def one_worker_more(result, call):
    result.o = [*result.o, result.o[0]]


def text_for_o(result, call):
    result.o = "o"


def writes(result, call):
    x = call.tensors["q"][0]
    x.flags.writeable = True
    x += 1


def tries_to_write(result, call):
    call.tensors["k"][0][...] = 0


def prints(result, call):
    print("here I am")


def prints_and_fails(result, call):
    print("here I am")
    raise RuntimeError("no such kernel")


def refuses(result, call):
    raise Refused("not today")


def exits(result, call):
    sys.exit(3)


def aborts(result, call):
    print("about to end", file=sys.stderr, flush=True)
    os.abort()


def segfaults(result, call):
    print("about to read nothing", file=sys.stderr, flush=True)
    ctypes.string_at(0)


def leaves(result, call):
    os._exit(7)


def hangs(result, call):
    time.sleep(600)


gradients_one_hop_short = Faulty("gradients one hop short", behind=rolled)
local_causal = Faulty("causal by local indices", before=local_positions)
no_sink = Faulty("no sink", before=without_sinks, recipe="bf16")
nan = Faulty("NaN", behind=one_nan)
float16 = Faulty("float16 for float32", behind=half)
swapped_workers = Faulty("swapped workers", behind=swapped)
wrong_shape = Faulty("wrong shape", behind=short)
missing = Faulty("missing dv", behind=without_dv)
less = Faulty("one worker less", behind=one_worker_less)
more = Faulty("one worker more", behind=one_worker_more)
text = Faulty("text", behind=text_for_o)
mutates = Faulty("mutates", behind=writes)
tries = Faulty("tries to mutate", behind=tries_to_write)
chatty = Faulty("prints", behind=prints)
raises = Faulty("raises", behind=prints_and_fails)
refusing = Faulty("refuses", behind=refuses)
exiting = Faulty("exits", behind=exits)
aborting = Faulty("aborts", behind=aborts)
leaving = Faulty("leaves", behind=leaves)
hanging = Faulty("hangs", behind=hangs)
segfaulting = Faulty("segfaults", behind=segfaults)
right = reference_float32


def in_lists(name, behind):
    """The reference as an author's function over lists, with its result changed behind."""

    def function(call):
        result = reference_float32.run(call)
        behind(result, call)
        return {name: getattr(result, name) for name in RESULTS}

    return NumPyTarget(function, reference_float32.capabilities, name)


lists_right = in_lists("right", lambda result, call: None)
lists_nan = in_lists("NaN", one_nan)
lists_float16 = in_lists("float16", half)
lists_swapped = in_lists("swapped workers", swapped)
lists_mutates = in_lists("mutates", writes)
lists_chatty = in_lists("prints", prints)
lists_segfaulting = in_lists("segfaults", segfaults)
lists_hanging = in_lists("hangs", hangs)
