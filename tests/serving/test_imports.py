"""Which module may import which. Imports inside functions and for types alone count too."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest
from shell import ROOT

ROOMS = ("serving", "zoo", "compile_cache")


def modules():
    """Return the file of each module by its name."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in files}
    return {".".join(names[: -(names[-1] == "__init__") or None]): path for path, names in parts.items()}


FILES = modules()


def imported(node):
    """Return the modules that an import statement names."""
    match node:
        case ast.Import(names=names):
            return [name.name for name in names]
        case ast.ImportFrom(module=module, names=names):
            inner = [f"{module}.{name.name}" for name in names]
            return [name if name in FILES else module for name in inner]
    return []


def imports_of(path):
    return {name for node in ast.walk(ast.parse(path.read_text())) for name in imported(node)}


@cache
def imports():
    """Return the names that each module imports."""
    return {module: imports_of(path) for module, path in FILES.items()}


def importers(below, *forbidden):
    """Return the imports of modules below a package that are below one of the forbidden ones."""
    return {
        (module, name)
        for module, names in imports().items()
        if f"{module}.".startswith(f"{below}.")
        for name in names
        if any(f"{name}.".startswith(f"{one}.") for one in forbidden)
    }


def test_every_import_is_found():
    assert len(FILES) > 200
    assert {"serving.protocol", "serving.audio.pcm"} <= imports()["serving.engine.connections"]
    assert "serving.http.server" in imports()["serving.http.speech"]


# The store of voices and the decoder still lie in HTTP.
IN_HTTP = {
    ("serving.cli.common", "serving.http.decode"),
    ("serving.cli.voices", "serving.http.voices"),
}


@pytest.mark.parametrize("below", ["serving.cli", "serving.tools"])
def test_commands_and_tools_do_not_import_http(below):
    assert importers(below, "serving.http") - IN_HTTP == set()


def test_audio_knows_no_other_wing():
    wings = ("cli", "engine", "http", "tools", "protocol", "supervisor", "engine_client", "settings")
    assert importers("serving.audio", *(f"serving.{wing}" for wing in wings), "zoo", "compile_cache") == set()


def test_http_knows_neither_the_engine_nor_models():
    """Of the zoo it knows requests and how text is prepared, which need no torch."""
    found = importers(
        "serving.http", "serving.engine", "serving.cli", "serving.tools", "compile_cache", "torch"
    )
    assert found == set()
    assert {name for _, name in importers("serving.http", "zoo")} <= {
        "zoo.align.words",
        "zoo.request",
        "zoo.text.markdown",
        "zoo.text.pauses",
        "zoo.text.pronunciations",
    }


def test_the_engine_knows_neither_http_nor_commands():
    assert importers("serving.engine", "serving.http", "serving.cli", "serving.tools") == set()


def test_only_the_cluster_imports_ray():
    """One engine needs no Ray. Even in the cluster's room most modules do without."""
    users = {module for module, name in importers("serving", "ray") | importers("zoo", "ray")}
    assert users == {f"serving.cluster.{name}" for name in ("deployment", "replica", "router")}
    others = {module for module, _ in importers("serving", "serving.cluster")}
    assert {module for module in others if not module.startswith("serving.cluster.")} == set()


@pytest.mark.parametrize("gateway", ["cluster", "on_demand"])
def test_gateways_know_neither_http_nor_the_engine(gateway):
    wings = ("http", "engine", "cli", "tools")
    assert importers(f"serving.{gateway}", *(f"serving.{wing}" for wing in wings), "torch", "zoo") == set()


def test_routes_are_leaves():
    """A helper that two routes need is not in a route."""
    users = {user for user, _ in importers("serving", "serving.http.routes")}
    assert users == {"serving.http.app"}


# Imports for types alone that still lead back.
BACK = {
    ("zoo.contract", "zoo.text"),
    ("zoo.request", "zoo.contract"),
}


def is_above(package, module):
    """Whether a module lies in a package, which Python imports before it in any case."""
    return module.startswith(f"{package}.")


def test_no_import_leads_back_to_its_module():
    graph = {
        module: {
            name
            for name in names
            if name in FILES and not is_above(name, module) and (module, name) not in BACK
        }
        for module, names in imports().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
