"""What a file of Python code means, for keys that a comment must not change."""

from __future__ import annotations

import ast


def meaning(source: bytes) -> bytes:
    """Return a Python file's syntax tree without docstrings. It has no comments and no line breaks either.
    Another release of Python may write the same tree in another way."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body[0] = ast.Pass()
    return ast.dump(tree).encode()
