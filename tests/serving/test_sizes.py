"""How large a class or a function may be, so that one reader can hold it in mind."""

import ast

import pytest
from shell import ROOT

MAX_ATTRIBUTES, MAX_CLASS_LINES, MAX_FUNCTION_LINES, MAX_COLUMNS = 20, 300, 80, 110


def nodes(folder, *kinds):
    """Return each class or function below a folder, by where it stands."""
    return {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": node
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds)
    }


def num_lines(node):
    return node.end_lineno - node.lineno + 1


def attributes(node):
    """Return the names that a class declares, or that its methods assign to `self`."""
    declared = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
    own = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    assigned = {each.attr for each in own if isinstance(each.ctx, ast.Store) and is_self(each.value)}
    return declared | assigned


def is_self(node):
    return isinstance(node, ast.Name) and node.id == "self"


CLASSES = nodes("serving/engine", ast.ClassDef)


def test_classes_of_the_engine_are_small():
    assert len(CLASSES) > 50
    large = {name: len(attributes(node)) for name, node in CLASSES.items()}
    assert {name: num for name, num in large.items() if num > MAX_ATTRIBUTES} == {}
    long = {name: num_lines(node) for name, node in CLASSES.items()}
    assert {name: num for name, num in long.items() if num > MAX_CLASS_LINES} == {}


@pytest.mark.parametrize("folder", ["serving", "zoo", "compile_cache"])
def test_functions_are_short(folder):
    found = {name: num_lines(node) for name, node in nodes(folder, ast.FunctionDef).items()}
    assert found
    long = {name for name, num in found.items() if num > MAX_FUNCTION_LINES}
    assert {name for name in long if "kernels" not in name} == set()


def test_lines_of_the_engine_fit_on_a_screen():
    """The formatter leaves texts as they are."""
    files = sorted((ROOT / "serving/engine").rglob("*.py"))
    assert files
    lines = [(path, number, line) for path in files for number, line in enumerate(path.open(), 1)]
    assert [f"{path.name}:{number}" for path, number, line in lines if len(line.rstrip()) > MAX_COLUMNS] == []


def test_attributes_are_counted():
    node = ast.parse("class A:\n x: int\n def f(self):\n  self.y = self.z = 1\n  self.w.v = 2").body[0]
    assert attributes(node) == {"x", "y", "z"}
