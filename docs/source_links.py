"""Sphinx extension: show each source file once.

The files of the specification and of ringspec.exact have pages that show their code. There, ``[source]`` of an object
leads to its place on that page, and sphinx.ext.viewcode writes no second copy. All other files of the repository keep
the page of viewcode; files of other packages get none.
"""

import sphinx.ext.viewcode as viewcode
from docutils import nodes
from sphinx import addnodes

# Folder of sources: the folder of its pages, and whether these have an anchor for each object.
SHOWN = {
    "ringspec.spec": ("spec/generated", True),
    "ringspec.problem": ("spec/generated", True),
    "ringspec.rings": ("spec/generated", True),
    "ringspec.exact": ("vectors/generated", False),
}
OURS = ("ringspec", "nki_impl")


def shown_on(module: str) -> tuple[str, bool] | None:
    """(page, has anchors) of a module that has a page with its code; None for another module.

    >>> shown_on("ringspec.spec.block"), shown_on("ringspec.errors")
    (('spec/generated/block', True), None)
    """
    package, _, file = module.rpartition(".")
    if package not in SHOWN:
        return None
    folder, has_anchors = SHOWN[package]
    return f"{folder}/{file}", has_anchors


def redirect(app, doctree) -> None:
    """Replace links to pages of viewcode that are not written; runs after viewcode has added them."""
    here = app.env.current_document.docname
    for anchor in list(doctree.findall(viewcode.viewcode_anchor)):
        module = anchor["reftarget"].removeprefix("_modules/").replace("/", ".")
        place = shown_on(module)
        if place is None and module.split(".")[0] in OURS:
            continue
        if place is None or place[0] == here:
            anchor.parent.remove(anchor)
            continue
        page, has_anchors = place
        text = nodes.inline("", "[source]", classes=["viewcode-link"])
        about = {
            "refdomain": "py" if has_anchors else "std",
            "reftype": "obj" if has_anchors else "doc",
            "reftarget": f"{module}.{anchor['refid']}" if has_anchors else f"/{page}",
            "refexplicit": True,
            "refdoc": here,
        }
        anchor.replace_self(addnodes.pending_xref("", text, **about))


def forget(app):
    """Keep viewcode from writing pages for files that are shown elsewhere or are not ours."""
    modules = getattr(app.env, "_viewcode_modules", {})
    for module in list(modules):
        if shown_on(module) or module.split(".")[0] not in OURS:
            del modules[module]
    return ()


def setup(app):
    app.setup_extension("sphinx.ext.viewcode")
    app.connect("doctree-read", redirect, priority=900)
    app.connect("html-collect-pages", forget, priority=100)
    return {"parallel_read_safe": True}
