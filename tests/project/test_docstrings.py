"""Public functions, classes and methods have a docstring. What it says is for ruff (rules D) and for readers."""

import inspect

from project.public import described


def without_docstring(value):
    """The names of an object and of its public methods that have no docstring."""
    silent = [] if says_something(value) else [value.__qualname__]
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        member = (
            member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        )
        if name.startswith("_") or not inspect.isfunction(member):
            continue
        # A short method may be explained in the docstring of its class.
        if not says_something(member) and name not in (value.__doc__ or ""):
            silent.append(member.__qualname__)
    return silent


def says_something(value):
    text = value.__doc__
    # A dataclass without a docstring gets its signature as one.
    return bool(text) and not text.startswith(f"{value.__name__}(")


def test_every_public_name_has_a_docstring():
    assert [name for value in described().values() for name in without_docstring(value)] == []


def test_a_silent_class_and_a_silent_method_are_found():
    class Silent:
        def told(self):
            """Something."""

        def untold(self):
            pass

    names = [name.rpartition(".")[2] for name in without_docstring(Silent)]
    assert names == ["Silent", "untold"]
